"""Adam and AdamW of all parameters in one launch, with gradients of f32 or less precision.

Bytes per parameter with a gradient of bf16: 26, the least there is with p, m and v of f32.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from onward.graph.types import LOW, DType
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.triton.multi_tensor import SIZE, by_kind, tables
from onward.kernels.triton.supported import where

_HYPER = range(5, 11)  # lr, beta1, beta2, eps, weight decay, the update's number


def _unsupported(spec: KernelSpec) -> str | None:
    own = (*spec.inputs[:1], *spec.inputs[2:5], *spec.outputs)
    strange = next((t.dtype for t in own if t is not None and t.dtype != DType.FLOAT), None)
    if strange is not None:
        return f"parameters or state of {strange.name.lower()}"
    g = spec.inputs[1]
    assert g is not None
    return None if g.dtype in (DType.FLOAT, *LOW) else f"a gradient of {g.dtype.name.lower()}"


def _scale(args: KernelArguments) -> torch.Tensor | None:
    return args.inputs[11] if len(args.inputs) > 11 else None


def _kind(call: KernelArguments) -> Hashable:
    """The gradient's dtype, the state and the hyperparameters, which calls of a launch share."""
    shared = call.inputs[_HYPER.start :]  # a scale among them
    pointers = tuple(None if x is None else x.data_ptr() for x in shared)
    return (call.x(1).dtype, len(call.outputs), call.attrs["decoupled"], pointers)


def _together(calls: Sequence[KernelArguments]) -> Launch:
    return by_kind([c for c in calls if c.y.numel()], _kind, _launch)


def _launch(calls: Sequence[KernelArguments]) -> Launch:
    from onward.kernels.triton import multi_tensor_device as device

    first = calls[0]
    rows = [[*c.inputs[:5], *[*c.outputs, None][:4]] for c in calls]
    table, blocks, aligned = tables(rows)
    hyper, scale = [first.x(i) for i in _HYPER], _scale(first)
    decoupled = bool(first.attrs["decoupled"])
    flags = {
        "DECOUPLED": decoupled, "MOST": len(first.outputs) > 3, "HAS_SCALE": scale is not None,
        "GRADIENT": device.ELEMENTS[first.x(1).dtype], "ALIGNED": aligned, "SIZE": SIZE,
        "num_warps": 8,
    }  # fmt: skip
    kernel: Any = device.adam

    def launch() -> None:
        kernel[(len(blocks),)](
            table, blocks, table if scale is None else scale, *numbers(hyper, decoupled), **flags
        )

    return launch


def numbers(hyper: Sequence[torch.Tensor], decoupled: bool) -> tuple[float, ...]:
    """What an update computes with, of lr, beta1, beta2, eps, weight decay and the update's number:
    beta1, 1 - beta1, beta2, 1 - beta2, lr / (1 - beta1^t), sqrt(1 - beta2^t), eps and the decay."""
    lr, beta1, beta2, eps, decay, step = (float(x) for x in hyper)
    return (
        beta1, 1.0 - beta1, beta2, 1.0 - beta2, lr / (1.0 - beta1**step),
        math.sqrt(1.0 - beta2**step), eps, 1.0 - lr * decay if decoupled else decay,
    )  # fmt: skip


def _bind(args: KernelArguments) -> Launch:
    return _together([args])


KERNELS: dict[str, Kernel] = {
    "AdamUpdate": Kernel(
        "triton.adam", _bind, unsupported=_unsupported, where=where,
        inplace=((0, 0), (1, 2), (2, 3), (3, 4)), contiguous=None, host=tuple(_HYPER),
        together=_together,
    ),
}  # fmt: skip
