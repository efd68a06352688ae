"""The sum in f32 of tensors of low precision and of f32, in one pass over memory.

Bytes per element with three terms of bf16 and one of f32: 14, where casts and sums one after
another move 54.
"""

from __future__ import annotations

import torch

from onward.graph.ops.wide_sum import MOST
from onward.graph.types import LOW, DType
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.library import library, where

_EACH = MOST // 2  # terms that the function takes of either type


def _unsupported(spec: KernelSpec) -> str | None:
    types = [t for t in spec.inputs if t is not None]
    for t in types:
        if t.dtype not in (DType.FLOAT, *LOW):
            return f"{t.dtype.name.lower()} tensors"
    low = sum(t.is_low for t in types)
    if low and max(low, len(types) - low) > _EACH:
        return f"more than {_EACH} terms of one type"
    return None


def _bind(args: KernelArguments) -> Launch:
    c = library()
    assert c is not None
    terms = [x for x in args.inputs if x is not None]
    # the first may be of another type than y; where all are of f32, half of them are
    first = sum(x.dtype != args.y.dtype for x in terms) or (len(terms) + 1) // 2
    low, wide = terms[:first], terms[first:]
    given: dict[str, torch.Tensor | None] = {}
    for kind, found in (("low", low), ("wide", wide)):
        given |= {f"{kind}{i}": x for i, x in enumerate([*found, *[None] * (_EACH - len(found))])}
    return c.launch("onward_wide_sum", **given, y=args.y, count=args.y.numel())


KERNELS: dict[str, Kernel] = {
    "WideSum": Kernel(
        "native.wide_sum", _bind, unsupported=_unsupported, where=where, contiguous=None,
        inplace=tuple((0, i) for i in range(MOST)),
    )
}  # fmt: skip
