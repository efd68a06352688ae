"""Kernel: one implementation of one op, bound once to its buffers and then launched in a loop."""

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
    """The torch dtype of a dtype. Raises KeyError for one that torch tensors do not have."""
    return _TORCH[dtype]


@dataclass(frozen=True)
class KernelSpec:
    """A call for which a kernel is chosen, before any memory exists."""

    op: str
    attrs: dict[str, Any]
    inputs: tuple[Type | None, ...]
    outputs: tuple[Type, ...]

    @property
    def is_static(self) -> bool:
        """Whether all sizes are numbers."""
        return all(t is None or t.is_static for t in (*self.inputs, *self.outputs))

    def mapped(self, function: Callable[[Type], Type]) -> KernelSpec:
        """The spec with other types, such as those with numbers for open sizes."""
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

    An absent optional input is None; an output nobody reads is still given memory. flag: i64[2],
    zeros before a run, for a kernel with an `input_error`; its own where nobody reads it. spare: of
    a tensor among these, how many rows of dim 0 lie behind its own that belong to nobody: their
    content is anything, and a launch may read and write them.
    """

    attrs: dict[str, Any]
    inputs: list[torch.Tensor | None]
    outputs: list[torch.Tensor]
    scratch: list[torch.Tensor]
    flag: torch.Tensor = field(default_factory=new_flag)
    calls: Any = None  # `region.RegionRuns` of a plan that has any
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

    bind: makes the launch: a call without arguments that writes the outputs. It reads no tensor's
        content on the host, which would wait there for all that a device has queued.
    where: None where its code can run at all on a target, else the reason.
    unsupported: None where the kernel applies to a call, else the reason. Sizes may be names: such
        a size is above 0, and equal to another where the two are written alike.
    faster: the kernel that was measured faster for a call on this machine; None where it is this.
    inplace: pairs (output, input): the output may lie in that input's memory.
    contiguous: inputs that must be contiguous; the plan copies others first. None means all.
    strided: outputs that may be written with any strides (last dim contiguous).
    scratch: temporaries the plan provides for the time of the launch; larger for larger operands.
    workspace: bytes that the call allocates inside by itself (upper bound), counted by the plan.
    input_error: what to raise for the flag that a launch has written (None: nothing), from its
        arguments and the flag's two numbers, not both 0. A launch with bad input touches no memory
        that is not its own, and what it leaves in its outputs is nobody's: the flags of a step are
        read at its end, before anything that outlives it is written.
    host: inputs whose content the launch reads on the host, which so lie in host memory.
    recordable: whether a device can record the launch and run it again without the host.
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
