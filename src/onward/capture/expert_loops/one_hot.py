"""Tensors that are known to be one-hot: of which numbers, and along which dim."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

Tensor = torch.Tensor


class OneHot(NamedTuple):
    """What a mask is the one-hot of. index: `i64[...]`, the mask's dims without its dim `dim` of
    classes. kept: `b[...]`, where it is more than zeros; None for everywhere."""

    index: Tensor
    dim: int
    kept: Tensor | None = None


def made_of(
    name: str, args: tuple[Any, ...], made: Tensor, hot: Callable[[Any], OneHot | None]
) -> OneHot | None:
    """What the result of a function is the one-hot of; None where that is not known.

    hot: the same of an argument.
    """
    if name == "one_hot":
        return OneHot(args[0], args[0].dim())
    held = next((h for h in map(hot, args) if h is not None), None)
    if held is None:
        return None
    index, dim, kept = held
    x = next(a for a in args if hot(a) is held)
    match name:
        case "permute":
            order = _order(x.dim(), args[1:])
            inner = [d - (d > dim) for d in order if d != dim]
            turned = None if kept is None else kept.permute(inner)
            return OneHot(index.permute(inner), order.index(dim), turned)
        case "to" | "long" | "int" | "bool" | "float" | "contiguous" | "detach" | "clone":
            return held
        case "view" | "reshape" if dim == x.dim() - 1 and made.shape[-1] == x.shape[-1]:
            shape = made.shape[:-1]
            return OneHot(index.reshape(shape), made.dim() - 1,
                          None if kept is None else kept.reshape(shape))  # fmt: skip
        case "mul" | "__mul__" | "__rmul__" | "__and__" | "logical_and":
            if len(args) != 2 or tuple(made.shape) != tuple(x.shape):
                return None
            own = made.gather(dim, index.unsqueeze(dim)).squeeze(dim) != 0
            return OneHot(index, dim, own)
        case _:
            return None


def _order(rank: int, given: Sequence[Any]) -> list[int]:
    """The dims that `permute` is given, as numbers or as one list, each from 0 to `rank - 1`."""
    dims = given[0] if len(given) == 1 and not isinstance(given[0], int) else given
    return [d % rank for d in dims]


__all__ = ["OneHot", "made_of"]
