"""WeightedLosses: several losses by name, of which a step trains the weighted sum."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, TypeAlias

import torch

from onward.errors import CaptureError, OnwardError

NamedLosses: TypeAlias = Callable[..., Mapping[str, torch.Tensor]]
"""A function of (outputs, *targets) that returns name -> f32[]."""


class WeightedLosses(torch.nn.Module):
    """Several losses by name, of which a step trains the weighted sum.

        losses = onward.WeightedLosses({"words": word_loss, "order": order_loss}, {"order": 0.5})
        trainer = onward.Trainer(model, optimizer, losses)
        trainer.train_step(**batch).losses  # {"words": f32[], "order": f32[]}, before the weights

    losses: functions of (outputs, *targets) by name, or one function of them that returns a mapping
    name -> f32[]. weights: factors by name; a loss that is not named has 1. They may be changed
    between steps (`losses.weights["order"] = 0.1`), which captures the step anew.

    Raises OnwardError for a weight that is no finite number.
    """

    def __init__(
        self,
        losses: NamedLosses | Mapping[str, Callable[..., torch.Tensor]],
        weights: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__()
        named = losses if isinstance(losses, Mapping) else {"": losses}
        for name, function in named.items():
            if isinstance(function, type) or not callable(function):
                raise OnwardError(
                    f"the loss {name!r} is {function!r}; fix: a function of (outputs, target)"
                )
        for name, weight in (weights or {}).items():
            if isinstance(weight, bool) or not isinstance(weight, Real) or math.isnan(weight):
                raise OnwardError(f"the weight of the loss {name!r} is {weight!r}; fix: a number")
        unknown = sorted({*(weights or {})} - {*named}) if isinstance(losses, Mapping) else []
        if unknown:
            raise _unknown(unknown, named)
        # attributes, so that a loss which is a module is a submodule, with its buffers
        self._names = list(named)
        for i, function in enumerate(named.values()):
            setattr(self, f"loss_{i}", function)
        self.weights = {name: float(weight) for name, weight in (weights or {}).items()}

    def parts(self, outputs: Any, *target: Any) -> dict[str, torch.Tensor]:
        """Returns each loss f32[], without its weight. Raises CaptureError for one that is no
        scalar."""
        found: dict[str, torch.Tensor] = {}
        for i, name in enumerate(self._names):
            loss = getattr(self, f"loss_{i}")(outputs, *target)
            found.update({name: loss} if name else loss)
        for name, loss in found.items():
            if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
                a_tensor = isinstance(loss, torch.Tensor)
                given = f"has {loss.dim()} dimensions" if a_tensor else f"is {loss!r}"
                raise CaptureError(f"the loss {name!r} {given}; fix: reduce it to a scalar")
        return found

    def total(self, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Returns the weighted sum f32[] of losses. Raises CaptureError for weights of others."""
        unknown = [name for name in self.weights if name not in parts]
        if unknown or not parts:
            raise CaptureError(str(_unknown(unknown, parts)))
        weighted = [self._weighted(name, loss) for name, loss in parts.items()]
        return sum(weighted[1:], start=weighted[0])

    def _weighted(self, name: str, loss: torch.Tensor) -> torch.Tensor:
        weight = self.weights.get(name, 1.0)
        return loss if weight == 1.0 else loss * weight

    def forward(self, outputs: Any, *target: Any) -> torch.Tensor:
        """Returns the weighted sum f32[] of the losses."""
        return self.total(self.parts(outputs, *target))


def _unknown(names: list[str], have: Mapping[str, Any]) -> OnwardError:
    if not have:
        return OnwardError("the loss function returns no losses; fix: a mapping name -> loss")
    return OnwardError(
        f"a weight is given for {names[0]!r}, which is none of the losses; fix: one of "
        f"{', '.join(have)}"
    )


__all__ = ["NamedLosses", "WeightedLosses"]
