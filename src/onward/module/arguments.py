"""The arguments of a call, and the part of them that a graph depends on."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from onward.errors import CaptureError
from onward.prepare.batch import Batch, leaf_kind, refuse_leaf

_PLAIN = frozenset({bool, int, float, str, type(None)})  # no containers, and hashed fast


class Kind:
    """The part of a call's arguments, besides sizes, that a graph depends on: structure; dtype,
    rank, device and `requires_grad` of each tensor; values of everything else. values: the plain
    numbers and strings. The hash is computed once, since each call looks in several tables."""

    __slots__ = ("_hash", "parts", "values")

    def __init__(self, structure: Any, leaves: tuple[Any, ...], values: tuple[Any, ...]) -> None:
        self.parts, self.values = (structure, leaves), values
        self._hash = hash((self.parts, values))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Kind)
            and self._hash == other._hash
            and self.values == other.values
            and self.parts == other.parts
        )


def bind_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Batch:
    """Makes a Batch of a call's arguments as they are, with its `Kind`. Raises CaptureError for
    arguments that no graph can take."""
    leaves: list[Any] = [*args, *kwargs.values()]
    structure: Any = (len(args), *kwargs)
    for leaf in leaves:
        if type(leaf) is not torch.Tensor and type(leaf) not in _PLAIN:
            leaves, structure = pytree.tree_flatten((args, kwargs, ()))
            break
    tensors: list[torch.Tensor] = []
    kinds: list[Any] = []
    values: list[Any] = []
    for leaf in leaves:
        if type(leaf) is torch.Tensor and _is_common(leaf):
            tensors.append(leaf)
            kinds.append((leaf.dtype, leaf.dim(), leaf.device, leaf.requires_grad))
            continue
        reason = refuse_leaf(leaf)
        if reason is not None:
            raise CaptureError(f"an argument is {reason}")
        if isinstance(leaf, torch.Tensor):
            tensors.append(leaf)
            kinds.append((leaf.dtype, leaf.dim(), leaf.device, leaf.requires_grad))
        else:
            kinds.append(type(leaf))
            values.append(leaf_kind(leaf))
    if not tensors:
        raise CaptureError("the call is given no tensor")
    kind = Kind(structure, tuple(kinds), tuple(values))
    return Batch(args, kwargs, (), tensors, (kind,), (kind, *[t.shape for t in tensors]))


def _is_common(x: torch.Tensor) -> bool:
    """Whether `refuse_leaf`, which is slower, would surely accept the tensor."""
    return not (vars(x) or x.layout is not torch.strided or x.is_nested or x.is_meta)


__all__ = ["Kind", "bind_call"]
