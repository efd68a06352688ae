"""Averaged weights: an exponential moving average of a model's parameters over its updates.

    average <- decay average + (1 - decay) parameter        after each update

The numbers are those of `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`:
the first update copies the parameters. Buffers are not averaged; the model's present ones belong to
the average, as is the default of AveragedModel.

Where each rank holds a part of a parameter, it averages that part, and a saved average is whole.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from onward.distribute import Mesh
from onward.errors import OnwardError
from onward.train.cut_tensors import Cut, part_of
from onward.train.parameter_parts import ParameterParts
from onward.train.state_part import State, StatePart, check_like, copied, unfit
from onward.train.torch_optimizer import paths_of

log = logging.getLogger("onward")

KEY = "ema"  # key in a Trainer's state_dict, absent before the first average


@dataclass
class Average:
    """The average of one parameter. tensor: its elements. cut: which part of the parameter they
    are; None: all."""

    tensor: torch.Tensor
    cut: Cut | None = None


class AveragedWeights:
    """The average of a model's parameters. decay: the share of the average that stays in an update;
    None: there is no average. parts: those of the parameters that this rank holds. lent: whether
    the model has the averaged weights at present."""

    def __init__(
        self, model: nn.Module, decay: float | None, parts: ParameterParts | None = None
    ) -> None:
        self._model, self.decay = model, decay
        self._parts = ParameterParts(Mesh()) if parts is None else parts
        self._averages: dict[torch.Tensor, Average] = {}  # by parameter
        self.lent = False

    def update(self) -> None:
        """Takes the parameters, as an update has left them, into the average. New parameters are
        copied; those that have left the model are forgotten."""
        if self.decay is None:
            return
        self._follow_cuts()
        before, now = self._averages, list(self._model.parameters())
        with torch.no_grad():
            old = [p for p in now if p in before]
            if old:
                average: Any = get_ema_multi_avg_fn(self.decay)
                average([before[p].tensor for p in old], [self._own(p) for p in old], None)
            self._averages = {p: before[p] if p in before else self._first(p) for p in now}

    @contextmanager
    def swapped_in(self) -> Generator[None]:
        """A context in which the model has the averaged weights, in its own memory or in that of
        its parts; afterwards it has its own again, to the bit. Before the first update they are the
        same. All ranks of a mesh enter it where weights are in parts. Raises OnwardError without a
        decay, and within another such context."""
        if self.decay is None:
            raise OnwardError("there are no averaged weights; fix: TrainerOptions(ema_decay=0.999)")
        self.require_own()
        self.lent = True
        self._follow_cuts()
        with torch.no_grad():
            backs = [self._lend(p, average) for p, average in self._averages.items()]
        try:
            yield
        finally:
            with torch.no_grad():
                for back in backs:
                    back()
            self.lent = False

    def state_dict(self) -> dict[str, Any]:
        """A copy of the model's state_dict with the averaged weights, whole on every rank. All
        ranks of a mesh call it where weights are in parts."""
        with self.swapped_in():
            return copied(self._parts.state_of(self._model, to_first=False))

    def require_own(self) -> None:
        """Raises OnwardError where the model has the averaged weights."""
        if self.lent:
            raise OnwardError(
                "the model has its averaged weights, within ema_weights(), which cannot be trained "
                "or saved as its own; fix: evaluate inside of that context only"
            )

    # ---- in parts

    def _own(self, parameter: torch.Tensor) -> torch.Tensor:
        """What this rank has of a parameter."""
        return self._parts.stored(parameter).detach()

    def _first(self, parameter: torch.Tensor) -> Average:
        return Average(self._own(parameter).clone(), self._parts.cut_of(parameter))

    def _follow_cuts(self) -> None:
        """Keeps of each average the part that this rank has of the parameter."""
        for p, average in self._averages.items():
            cut = self._parts.cut_of(p)
            if cut is not None and average.cut is None:
                average.tensor, average.cut = part_of(cut, average.tensor).clone(), cut

    def _lend(self, parameter: torch.Tensor, average: Average) -> Callable[[], None]:
        """Gives a parameter its average. Returns what gives it its own numbers back, of which a
        step in between may have left this rank a part."""
        parts = self._parts
        if average.cut is not None and parts.cut_of(parameter) is None:
            whole = parts.joined(parameter, average.cut, average.tensor, to_first=False)
            assert whole is not None, "every rank gets it"
            own = parameter.detach().clone()
            parameter.copy_(whole)
            return lambda: _put(self._own(parameter), parts.cut_of(parameter), own)
        _exchange(self._own(parameter), average.tensor)

        def back() -> None:
            held, cut = self._own(parameter), parts.cut_of(parameter)
            if cut == average.cut:
                _exchange(held, average.tensor)
                return
            own, average.tensor, average.cut = average.tensor, held.clone(), cut
            _put(held, cut, own)

        return back

    # ---- saved and restored

    def part(self, to_first: bool = False) -> StatePart:
        """The average's entry of `Trainer.state_dict`, by the parameters' paths. to_first: rank 0
        alone saves the whole of those that are in parts."""
        return StatePart(lambda: self._save(to_first), self._check, self._restore)

    def _save(self, to_first: bool) -> dict[str, Any]:
        self.require_own()
        paths, held = paths_of(self._model), dict[str, torch.Tensor]()
        for p, average in self._averages.items():
            if p not in paths:
                continue
            whole: torch.Tensor | None = average.tensor
            if average.cut is not None:
                whole = self._parts.joined(p, average.cut, average.tensor, to_first)
            if whole is not None:
                held[paths[p]] = whole
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
                parameters[path]: Average(torch.empty_like(parameters[path]).copy_(average))
                for path, average in held.items()
            }

        def back() -> None:
            self._averages = before

        return back


def _exchange(a: torch.Tensor, b: torch.Tensor) -> None:
    """Exchanges the numbers of two tensors."""
    held = a.clone()
    a.copy_(b)
    b.copy_(held)


def _put(held: torch.Tensor, cut: Cut | None, whole: torch.Tensor) -> None:
    """Gives what a rank has of a parameter its numbers. cut: which part that is; None: all."""
    held.copy_(whole if cut is None else part_of(cut, whole))


__all__ = ["KEY", "Average", "AveragedWeights"]
