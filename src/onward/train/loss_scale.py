"""The loss scale of a Trainer: its present value, its update from step to step, its saved state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from onward.execute import Executable
from onward.graph.signature import Signature
from onward.options import LEAST_SCALE, LossScale
from onward.train.state_part import State, StatePart, unfit

KEY = "loss_scale"  # key in a Trainer's state_dict, absent where losses are not scaled


class Scaling:
    """The present loss scale, and the number of updates since it last changed (the growth tracker).

    settings: the rule by which the scale moves, a fixed number, or None: losses are not scaled.
    Each step graph computes the next scale; it takes effect at the end of the window.
    """

    def __init__(self, settings: LossScale | float | None, device: torch.device) -> None:
        self.settings = settings
        self._device = device
        start = settings.init_scale if isinstance(settings, LossScale) else settings
        self._set(1.0 if start is None else start, 0)

    @property
    def moves(self) -> bool:
        """Whether a rule moves the scale."""
        return isinstance(self.settings, LossScale)

    @property
    def value(self) -> float | None:
        """The scale of the next micro-batch; None where gradients are not scaled."""
        return None if self.settings is None else float(self._scale)

    def inputs(self, signature: Signature) -> dict[str, torch.Tensor]:
        """The scale and the growth tracker, by graph input."""
        named = {signature.loss_scale: self._scale, signature.growth_tracker: self._tracker}
        return {name: tensor for name, tensor in named.items() if name is not None}

    def advance(self, executable: Executable) -> None:
        """Takes over the next scale from the last run of a window, in new tensors, so that the
        inputs of that run keep their values."""
        signature = executable.plan.signature
        if signature.loss_scale is not None and signature.growth_tracker is not None:
            following = signature.rescaled
            self._scale = executable.output(following[signature.loss_scale])
            self._tracker = executable.output(following[signature.growth_tracker])

    # ---- saved and restored

    def part(self) -> StatePart:
        """The loss scale's entry of `Trainer.state_dict`; empty where losses are not scaled."""
        return StatePart(self._save, self._check, self._restore)

    def _save(self) -> dict[str, Any]:
        if self.settings is None:
            return {}
        return {KEY: {"scale": float(self._scale), "growth_tracker": int(self._tracker)}}

    def _check(self, state: State) -> None:
        held = state.get(KEY)
        if held is not None:
            _check(held)
        if not state["micro_steps"]:
            return
        before = 1.0 if held is None else float(held["scale"])
        own = self.value or 1.0
        if held is None if self.moves else before != own:
            raise unfit(
                "it was saved in the middle of gradient accumulation with gradients scaled "
                f"by {before:g}, but the loss scale here is {own:g}; fix: save between "
                "optimizer updates"
            )

    def _restore(self, state: State) -> Callable[[], None]:
        """Restores a checked state; one without a scale starts from the initial scale."""
        before = dict(vars(self))
        if isinstance(self.settings, LossScale):
            held = state.get(KEY) or {"scale": self.settings.init_scale, "growth_tracker": 0}
            self._set(float(held["scale"]), int(held["growth_tracker"]))
        return lambda: vars(self).update(before)

    def _set(self, scale: float, tracker: int) -> None:
        self._scale = torch.tensor(scale, dtype=torch.float32, device=self._device)
        self._tracker = torch.tensor(tracker, dtype=torch.int64, device=self._device)


def _check(held: Any) -> None:
    if not isinstance(held, Mapping):
        raise unfit(f"'{KEY}' is a {type(held).__name__}")
    scale, tracker = held.get("scale"), held.get("growth_tracker")
    if not isinstance(scale, float) or not LEAST_SCALE <= scale <= torch.finfo(torch.float32).max:
        raise unfit(f"{KEY}: scale is {scale!r}")
    if isinstance(tracker, bool) or not isinstance(tracker, int) or tracker < 0:
        raise unfit(f"{KEY}: growth_tracker is {tracker!r}, no count")


__all__ = ["KEY", "Scaling"]
