"""Onward's kernels: the only module that knows their table and how they are bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from onward.graph.types import DType, Type
from onward.kernels import ATEN, KERNELS, Kernel, KernelArguments, KernelSpec, host, torch_dtype
from onward.kernels.blas.engines import engines
from onward.kernels.native.library import library

Launch = Callable[[], Any]

# Ops with a kernel of our own; the others run on PyTorch's operators.
NATIVE_OPS = frozenset(
    op for op, kernels in KERNELS.items() if op not in ATEN or len(kernels) > len(ATEN[op])
)
_DTYPES = {
    torch_dtype(dtype): dtype
    for dtype in (
        DType.FLOAT, DType.DOUBLE, DType.FLOAT16, DType.BFLOAT16, DType.INT64, DType.INT32,
        DType.UINT8, DType.BOOL,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Bound:
    """A kernel that was bound to operands: its op, its name, the operands, and the launch."""

    op: str
    kernel: str
    args: KernelArguments
    launch: Launch

    @property
    def spec(self) -> KernelSpec:
        """The call without its memory, at the sizes of the operands."""
        args = self.args
        inputs = tuple(None if x is None else type_of(x) for x in args.inputs)
        return KernelSpec(self.op, args.attrs, inputs, tuple(type_of(y) for y in args.outputs))


def type_of(x: torch.Tensor) -> Type:
    """The element type and the sizes."""
    return Type(_DTYPES[x.dtype], tuple(x.shape))


@contextmanager
def watched(before: Callable[[Bound], None] | None = None) -> Iterator[list[Bound]]:
    """Lists the kernels that are bound within the block, by whomever.

    before: is told each launch of theirs, while its operands still hold what it will read.
    """
    bound: list[Bound] = []

    def seen(op: str, kernel: Kernel) -> Kernel:
        def bind(args: KernelArguments) -> Launch:
            item = Bound(op, kernel.name, args, kernel.bind(args))
            bound.append(item)
            return item.launch if before is None else partial(_told, before, item)

        return replace(kernel, bind=bind)

    kept = dict(KERNELS)
    KERNELS.update({op: tuple(seen(op, k) for k in kernels) for op, kernels in kept.items()})
    try:
        yield bound
    finally:
        KERNELS.update(kept)


def _told(before: Callable[[Bound], None], item: Bound) -> None:
    before(item)
    item.launch()


def applicable(spec: KernelSpec, first: str = "") -> list[Kernel]:
    """The kernels that take the call on the CPU, in the table's order but for the `first`."""
    target = host()
    found = [
        kernel
        for kernel in KERNELS.get(spec.op, ())
        if kernel.where(target) is None and kernel.unsupported(spec) is None
    ]
    return sorted(found, key=lambda kernel: kernel.name != first)


def preferred(spec: KernelSpec) -> str:
    """The name of the kernel that a plan takes."""
    return next(kernel.name for kernel in applicable(spec) if kernel.faster(spec) is None)


def products(a: torch.Tensor, b: torch.Tensor, y: torch.Tensor) -> dict[str, Launch]:
    """`y = a @ b` by each engine that Onward calls from PyTorch's threads, by kernel."""
    return {
        kernel.name: kernel.bind(KernelArguments({}, [a, b], [y], []))
        for kernel in KERNELS["Gemm"]
        if kernel.name.partition(".")[0] in engines()
    }


def native_level() -> str:
    """The build of the native kernels that this process loaded, or none."""
    found = library()
    return "none" if found is None else found.level


__all__ = [
    "NATIVE_OPS",
    "Bound",
    "Kernel",
    "KernelArguments",
    "KernelSpec",
    "Launch",
    "applicable",
    "native_level",
    "preferred",
    "products",
    "torch_dtype",
    "type_of",
    "watched",
]
