"""Kernel: one implementation of an op, bound to buffers once and then launched many times."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from onward.graph.types import DType, Type
from onward.kernels.target import Target

Launch: TypeAlias = Callable[[], Any]
FLAG = Type(DType.INT64, (2,))

_TORCH: dict[DType, torch.dtype] = {
    DType.FLOAT: torch.float32,
    DType.DOUBLE: torch.float64,
    DType.FLOAT16: torch.float16,
    DType.BFLOAT16: torch.bfloat16,
    DType.INT64: torch.int64,
    DType.INT32: torch.int32,
    DType.INT16: torch.int16,
    DType.INT8: torch.int8,
    DType.UINT8: torch.uint8,
    DType.BOOL: torch.bool,
}


def torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of a dtype. Raises KeyError for one that torch lacks."""
    return _TORCH[dtype]


@dataclass(frozen=True)
class KernelSpec:
    """A call to choose a kernel for, before it has memory."""

    op: str
    attrs: dict[str, Any]
    inputs: tuple[Type | None, ...]
    outputs: tuple[Type, ...]

    @property
    def is_static(self) -> bool:
        """Whether all sizes are numbers."""
        return all(t is None or t.is_static for t in (*self.inputs, *self.outputs))

    def mapped(self, function: Callable[[Type], Type]) -> KernelSpec:
        """The spec with each type replaced by `function(type)`."""
        return replace(
            self,
            inputs=tuple([None if t is None else function(t) for t in self.inputs]),
            outputs=tuple([function(t) for t in self.outputs]),
        )


def no_rows(x: torch.Tensor) -> int:
    return 0


def new_flag() -> torch.Tensor:
    return torch.zeros(2, dtype=torch.int64)


@dataclass(frozen=True)
class KernelArguments:
    """A call with memory: tensors to read, tensors to write, temporaries.

    An absent optional input is None; an output that nobody reads still has memory. flag: i64[2],
    zeros before a run, written by kernels with an `input_error`. spare: for one of these tensors,
    the number of spare rows of dim 0 that follow it in memory: their content is arbitrary, and a
    launch may read and write them.
    """

    attrs: dict[str, Any]
    inputs: list[torch.Tensor | None]
    outputs: list[torch.Tensor]
    scratch: list[torch.Tensor]
    flag: torch.Tensor = field(default_factory=new_flag)
    calls: Any = None  # the plan's `region.RegionRuns`, if it has regions
    ranks: Any = None  # the plan's `collective.RankGroups`, if it has collectives
    spare: Callable[[torch.Tensor], int] = no_rows

    def x(self, i: int = 0) -> torch.Tensor:
        tensor = self.inputs[i]
        assert tensor is not None
        return tensor

    @property
    def y(self) -> torch.Tensor:
        return self.outputs[0]


def nothing(spec: KernelSpec) -> list[Type]:
    return []


def no_bytes(spec: KernelSpec) -> int:
    return 0


def anywhere(target: Target) -> str | None:
    return None


def nothing_faster(spec: KernelSpec) -> str | None:
    return None


@dataclass(frozen=True)
class Kernel:
    """One implementation of one op.

    bind: makes the launch: a call without arguments that writes the outputs. It must not read
        tensors on the host, which would wait for all queued work of a device.
    where: None if the code can run on a target at all, else the reason.
    unsupported: None if the kernel applies to a call, else the reason. Sizes may be symbolic: a
        symbol is above 0, and equal to another only where the two are written alike.
    faster: the kernel that was measured faster for a call on this machine; None if this one was.
    inplace: pairs (output, input): the output may overwrite that input.
    contiguous: inputs that must be contiguous; the plan copies others first. None means all.
    strided: outputs that may have any strides (last dim contiguous).
    scratch: temporaries that the plan provides during the launch; larger for larger operands.
    workspace: bytes that the call allocates itself (upper bound), which the plan counts.
    input_error: the error to raise, from a launch's arguments and the two numbers, not both 0, in
        its flag; None for no error. A launch with bad input must not touch memory of others; its
        outputs are undefined. A step reads its flags before it writes what outlives it.
    host: inputs that the launch reads on the host, and that must lie in host memory.
    recordable: whether a device can record the launch and replay it without the host.
    together: binds consecutive calls of static sizes, which are independent, as one launch; None
        where each has its own.
    """

    name: str
    bind: Callable[[KernelArguments], Launch]
    unsupported: Callable[[KernelSpec], str | None] = lambda spec: None
    inplace: tuple[tuple[int, int], ...] = ()
    contiguous: tuple[int, ...] | None = ()
    strided: tuple[int, ...] = ()
    scratch: Callable[[KernelSpec], list[Type]] = nothing
    workspace: Callable[[KernelSpec], int] = no_bytes
    where: Callable[[Target], str | None] = anywhere
    faster: Callable[[KernelSpec], str | None] = nothing_faster
    input_error: Callable[[KernelArguments, Sequence[int]], Exception | None] | None = None
    host: tuple[int, ...] = ()
    recordable: bool = True
    together: Callable[[Sequence[KernelArguments]], Launch] | None = None
