"""A batch as one call of the model: arguments, targets, and a cheap signature of their shapes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from onward.config import OnwardError

_TARGETS = ("labels", "target", "targets")


@dataclass
class Call:
    """`model(*args, **kwargs)`, then `loss_fn(outputs, *target)` where there is one.

    tensors: the tensor leaves in order; kind: structure, non-tensor values, dtypes and ranks;
    signature: kind and sizes, the key of a plan.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: tuple[Any, ...]
    tensors: list[torch.Tensor]
    kind: tuple[Any, ...]
    signature: tuple[Any, ...]

    @property
    def batch_size(self) -> int:
        """Dim 0 of the first tensor."""
        return next((t.shape[0] for t in self.tensors if t.dim()), 1)

    def named(self) -> dict[str, Any]:
        """Keyword inputs by name; positional ones as `input_0`, ...; targets as `labels`."""
        out = {f"input_{i}": a for i, a in enumerate(self.args)} | self.kwargs
        return out | ({"labels": self.target[0]} if self.target else {})


def bind_call(args: tuple[Any, ...], kwargs: dict[str, Any], has_loss: bool) -> Call:
    """Raises OnwardError where the batch is empty or lacks the target a loss function needs."""
    if len(args) == 1 and not kwargs:
        if isinstance(args[0], Mapping):
            args, kwargs = (), dict(args[0])
        elif isinstance(args[0], (tuple, list)):
            args = tuple(args[0])
    target: tuple[Any, ...] = ()
    if has_loss:
        key = next((k for k in _TARGETS if k in kwargs), None)
        if key is not None:
            kwargs = dict(kwargs)
            target = (kwargs.pop(key),)
        elif len(args) >= 2:
            args, target = args[:-1], (args[-1],)
        else:
            raise OnwardError(
                "a loss_fn needs a target; fix: train_step(input, target), or labels= in the batch"
            )
    leaves, spec = pytree.tree_flatten((args, kwargs, target))
    tensors = [v for v in leaves if isinstance(v, torch.Tensor)]
    if not tensors:
        raise OnwardError("the batch has no tensor; fix: pass the model's inputs")
    plain = tuple(v if not isinstance(v, torch.Tensor) else (v.dtype, v.dim()) for v in leaves)
    kind = (spec, plain)
    return Call(args, kwargs, target, tensors, kind, (kind, tuple(t.shape for t in tensors)))
