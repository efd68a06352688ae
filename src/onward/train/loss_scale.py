"""The loss scale of a Trainer: what it is now, handed from run to run, saved and restored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from onward.config import LEAST_SCALE, LossScale, OnwardError
from onward.execute import Executable
from onward.graph.signature import Signature

KEY = "loss_scale"  # in a Trainer's state_dict, where there is a scale


class Scaling:
    """The present scale, and the updates that it has stayed as it is.

    settings: the rule by which it moves, a fixed number, or None: gradients are not scaled. A step
    graph computes what comes next; until the end of the window nothing changes.
    """

    def __init__(self, settings: LossScale | float | None, device: torch.device) -> None:
        self.settings = settings
        self._device = device
        start = settings.init_scale if isinstance(settings, LossScale) else settings
        self._set(1.0 if start is None else start, 0)

    @property
    def moves(self) -> bool:
        """Whether there is a rule."""
        return isinstance(self.settings, LossScale)

    @property
    def value(self) -> float | None:
        """The scale of the next micro-batch; None where gradients are not scaled."""
        return None if self.settings is None else float(self._scale)

    def inputs(self, signature: Signature) -> dict[str, torch.Tensor]:
        """By graph input."""
        named = {signature.loss_scale: self._scale, signature.growth_tracker: self._tracker}
        return {name: tensor for name, tensor in named.items() if name is not None}

    def advance(self, executable: Executable) -> None:
        """After a window: what its last run says comes next. The tensors are others then, so that
        the inputs of that run stay what they were."""
        signature = executable.plan.signature
        if signature.loss_scale is not None and signature.growth_tracker is not None:
            following = signature.rescaled
            self._scale = executable.output(following[signature.loss_scale])
            self._tracker = executable.output(following[signature.growth_tracker])

    # ---- saved and restored

    def state(self) -> dict[str, Any]:
        """For `Trainer.state_dict`: nothing where gradients are not scaled."""
        if self.settings is None:
            return {}
        return {KEY: {"scale": float(self._scale), "growth_tracker": int(self._tracker)}}

    def check(self, state: Mapping[str, Any]) -> None:
        """Raises OnwardError for a state that cannot be gone on from."""
        held = state.get(KEY)
        if held is not None:
            _check(held)
        if not state["micro_steps"]:
            return
        before = 1.0 if held is None else float(held["scale"])
        own = self.value or 1.0
        if held is None if self.moves else before != own:
            raise _error(
                "it was saved in the middle of gradient accumulation with gradients scaled "
                f"by {before:g}, but the loss scale here is {own:g}; fix: save between "
                "optimizer updates"
            )

    def restore(self, state: Mapping[str, Any]) -> None:
        """Goes on from a state that was checked; one without a scale begins anew."""
        if isinstance(self.settings, LossScale):
            held = state.get(KEY) or {"scale": self.settings.init_scale, "growth_tracker": 0}
            self._set(held["scale"], held["growth_tracker"])

    def _set(self, scale: float, tracker: int) -> None:
        self._scale = torch.tensor(scale, dtype=torch.float32, device=self._device)
        self._tracker = torch.tensor(tracker, dtype=torch.int64, device=self._device)


def _check(held: Any) -> None:
    if not isinstance(held, Mapping):
        raise _error(f"'{KEY}' is a {type(held).__name__}, not a dict")
    scale, tracker = held.get("scale"), held.get("growth_tracker")
    if not isinstance(scale, float) or not LEAST_SCALE <= scale <= torch.finfo(torch.float32).max:
        raise _error(f"the loss scale in '{KEY}' is {scale!r}, not a positive float32")
    if isinstance(tracker, bool) or not isinstance(tracker, int) or tracker < 0:
        raise _error(f"growth_tracker in '{KEY}' is {tracker!r}, not a count")


def _error(what: str) -> OnwardError:
    return OnwardError(f"the state_dict does not fit this Trainer: {what}; nothing was loaded")


__all__ = ["KEY", "Scaling"]
