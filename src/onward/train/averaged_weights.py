"""Averaged weights: an exponential moving average of a model's parameters over its updates.

    average <- decay average + (1 - decay) parameter        after each update

The numbers are those of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`:
the first update copies the parameters. Buffers are not averaged; the model's present ones belong to
the average, as is the default of AveragedModel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from onward.errors import OnwardError
from onward.train.state_part import State, StatePart, check_like, copied, unfit
from onward.train.torch_optimizer import paths_of

log = logging.getLogger("onward")

KEY = "ema"  # key in a Trainer's state_dict, absent before the first average


class AveragedWeights:
    """The average of a model's parameters. decay: the share of the average that stays in an update;
    None: there is no average. lent: whether the model has the averaged weights at present."""

    def __init__(self, model: nn.Module, decay: float | None) -> None:
        self._model, self.decay = model, decay
        self._averages: dict[torch.Tensor, torch.Tensor] = {}  # by parameter
        self.lent = False

    def update(self) -> None:
        """Takes the parameters, as an update has left them, into the average. New parameters are
        copied; those that have left the model are forgotten."""
        if self.decay is None:
            return
        before, now = self._averages, list(self._model.parameters())
        with torch.no_grad():
            old = [p for p in now if p in before]
            if old:
                average: Any = get_ema_multi_avg_fn(self.decay)
                average([before[p] for p in old], [p.detach() for p in old], None)
            self._averages = {p: before[p] if p in before else p.detach().clone() for p in now}

    @contextmanager
    def swapped_in(self) -> Generator[None]:
        """A context in which the model has the averaged weights, in its own memory; afterwards it
        has its own again, to the bit. Before the first update they are the same. Raises OnwardError
        without a decay, and within another such context."""
        if self.decay is None:
            raise OnwardError("there are no averaged weights; fix: TrainerOptions(ema_decay=0.999)")
        self.require_own()
        self.lent = True
        self._swap()
        try:
            yield
        finally:
            self._swap()
            self.lent = False

    def state_dict(self) -> dict[str, Any]:
        """A copy of the model's state_dict with the averaged weights."""
        with self.swapped_in():
            return copied(self._model.state_dict())

    def require_own(self) -> None:
        """Raises OnwardError where the model has the averaged weights."""
        if self.lent:
            raise OnwardError(
                "the model has its averaged weights, within ema_weights(), which cannot be trained "
                "or saved as its own; fix: evaluate inside of that context only"
            )

    def _swap(self) -> None:
        with torch.no_grad():
            for p, average in self._averages.items():
                own = p.detach().clone()
                p.copy_(average)
                average.copy_(own)

    # ---- saved and restored

    def part(self) -> StatePart:
        """The average's entry of `Trainer.state_dict`, by the parameters' paths."""
        return StatePart(self._save, self._check, self._restore)

    def _save(self) -> dict[str, Any]:
        self.require_own()
        paths = paths_of(self._model)
        held = {paths[p]: average for p, average in self._averages.items() if p in paths}
        return {KEY: held} if held else {}

    def _check(self, state: State) -> None:
        self.require_own()
        held = state.get(KEY, {})
        if not isinstance(held, dict):
            raise unfit(f"'{KEY}' is a {type(held).__name__}")
        parameters = {path: p for p, path in paths_of(self._model).items()}
        strange = [str(path) for path in held if path not in parameters]
        if strange:
            raise unfit(f"{KEY} has an average of {strange[0]}, which is no parameter here")
        for path, average in held.items():
            check_like(f"{KEY}.{path}", average, parameters[path])
        if held and self.decay is None:
            log.warning(
                "the state has averaged weights, which are left out: ema_decay is None here"
            )

    def _restore(self, state: State) -> Callable[[], None]:
        """Restores a checked state; one without averages starts at the next update."""
        before = self._averages
        parameters = {path: p for p, path in paths_of(self._model).items()}
        held = {} if self.decay is None else state.get(KEY, {})
        with torch.no_grad():
            self._averages = {
                parameters[path]: torch.empty_like(parameters[path]).copy_(average)
                for path, average in held.items()
            }

        def back() -> None:
            self._averages = before

        return back


__all__ = ["KEY", "AveragedWeights"]
