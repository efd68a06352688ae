"""Layer normalization, alone and with the residual sum and dropout before it, in one pass over
memory; and the gradient of both in one pass, whose sums over rows are added in a fixed order.

Bytes per element with x and y of bf16 and a residual of f32: 12 forward and 16 backward, where
separate operators move 40 and more.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from onward.graph.ops.norm import has_dx
from onward.graph.types import DType, Type, product
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.triton.norm_blocks import (
    WIDEST,
    factor,
    norm_mask,
    programs_of,
    tile,
    warps,
)
from onward.kernels.triton.random import outer_sizes
from onward.kernels.triton.supported import other_types, where

_PROGRAMS = 512  # at most, that share the sums over rows


def _features(spec: KernelSpec) -> Any:
    scale = spec.outputs[1] if spec.op.endswith("Grad") else spec.inputs[_scale_at(spec.op)]
    assert scale is not None
    return scale.shape[0] if scale.rank == 1 else 0


def _scale_at(op: str) -> int:
    return 2 if op.startswith("Add") else 1


def _rank(spec: KernelSpec) -> int:
    """The rank of what is normalised."""
    return spec.outputs[0].rank


def _unsupported(spec: KernelSpec) -> str | None:
    adds = spec.op.startswith("Add")
    if not adds and int(spec.attrs.get("axis", -1)) % _rank(spec) != _rank(spec) - 1:
        return "it normalises more than the last dim"
    if not 1 < _rank(spec) <= 5:
        return f"{_rank(spec)} dims"
    features = _features(spec)
    if not isinstance(features, int):
        return "an open width"
    if not 0 < features <= WIDEST:
        return f"rows of more than {WIDEST} numbers"
    if spec.attrs.get("ratio", 0.0) >= 1.0:
        return "ratio 1"
    inputs, outputs = list(spec.inputs), list(spec.outputs)
    if spec.op == "AddLayerNormalization":
        free = [inputs.pop(0), outputs.pop(0)]  # x and y
    elif spec.op == "AddLayerNormalizationGrad":
        free = [inputs.pop(0), outputs.pop() if has_dx(spec.attrs) else None]  # dy and dx
    else:
        free = []
    if (why := other_types(free)) is not None:
        return why
    for t in (*inputs, *outputs):
        if t is not None and t.is_floating and t.dtype != DType.FLOAT:
            return f"{t.dtype.name.lower()} tensors"
    return None


def _scratch(spec: KernelSpec) -> list[Type]:
    """Each program's sums for dscale and dbias, f32[programs, 2, D]."""
    rows, features = product(spec.outputs[0].shape[:-1]), _features(spec)
    assert isinstance(rows, int)
    # an upper bound: smaller batches of the same plan use at most as many programs
    programs = min(_PROGRAMS, max(1, math.ceil(rows / tile(features)[1])))
    return [Type(DType.FLOAT, (programs, 2, features))]


def _forward(args: KernelArguments, adds: bool) -> Launch:
    from onward.kernels.triton import norm_device as device

    x, scale = args.x(0), args.x(2 if adds else 1)
    bias = [*args.inputs, None][3 if adds else 2] if len(args.inputs) > (3 if adds else 2) else None
    y, mean, invstd = args.outputs[:3]
    residual, r = (args.x(1), args.outputs[3]) if adds else (x, y)
    outer, features = list(x.shape[:-1]), x.shape[-1]
    rows = math.prod(outer)
    width, block = tile(features)
    tensors, flags = norm_mask(args, outer, 4) if adds else norm_mask(args, outer, len(args.inputs))
    kernel: Any = device.layer_norm
    epsilon = float(args.attrs.get("epsilon", 1e-5))
    grid = (math.ceil(rows / block),)

    def launch() -> None:
        if rows:
            kernel[grid](
                x, residual, scale, scale if bias is None else bias, y, mean, invstd, r, *tensors,
                rows, *outer_sizes(outer), int(args.attrs.get("site", 0)), factor(args), epsilon,
                FEATURES=features, WIDTH=width, ROWS=block, ADDS=adds, HAS_BIAS=bias is not None,
                num_warps=warps(width), **flags,
            )  # fmt: skip

    return launch


def _bind_layer_norm(args: KernelArguments) -> Launch:
    return _forward(args, adds=False)


def _bind_add_layer_norm(args: KernelArguments) -> Launch:
    return _forward(args, adds=True)


def _gradient(args: KernelArguments, inputs: list[torch.Tensor | None], seed_at: int) -> Launch:
    from onward.kernels.triton import norm_device as device

    dy, dr, r, scale, mean, invstd = inputs
    assert dy is not None and r is not None and scale is not None
    dresidual, dscale, dbias, *rest = args.outputs
    dx = rest[0] if rest else None
    outer, features = list(r.shape[:-1]), r.shape[-1]
    rows = math.prod(outer)
    width, block = tile(features)
    programs, blocks = programs_of(rows, features, _PROGRAMS)
    partial = args.scratch[0][:programs]  # f32[programs,2,D]
    tensors, flags = norm_mask(args, outer, seed_at)
    kernel: Any = device.layer_norm_gradient

    def launch() -> None:
        kernel[(programs,)](
            dy, dy if dr is None else dr, r, scale, mean, invstd, dresidual,
            dresidual if dx is None else dx, partial, *tensors, rows, blocks, *outer_sizes(outer),
            int(args.attrs.get("site", 0)), factor(args), FEATURES=features, WIDTH=width,
            ROWS=block, HAS_DR=dr is not None, HAS_DX=dx is not None, num_warps=warps(width),
            **flags,
        )  # fmt: skip
        torch.sum(partial[:, 0], 0, out=dscale)
        torch.sum(partial[:, 1], 0, out=dbias)

    return launch


def _bind_layer_norm_grad(args: KernelArguments) -> Launch:
    dy, x, scale, mean, invstd = args.inputs[:5]
    return _gradient(args, [dy, None, x, scale, mean, invstd], len(args.inputs))


def _bind_add_layer_norm_grad(args: KernelArguments) -> Launch:
    return _gradient(args, args.inputs[:6], 6)


KERNELS: dict[str, Kernel] = {
    "LayerNormalization": Kernel(
        "triton.layer_norm", _bind_layer_norm, unsupported=_unsupported, where=where,
        inplace=((0, 0),), contiguous=None,
    ),
    "LayerNormalizationGrad": Kernel(
        "triton.layer_norm_grad", _bind_layer_norm_grad, unsupported=_unsupported, where=where,
        inplace=((0, 0), (0, 1)), contiguous=None, scratch=_scratch,
    ),
    "AddLayerNormalization": Kernel(
        "triton.add_layer_norm", _bind_add_layer_norm, unsupported=_unsupported, where=where,
        inplace=((0, 0), (3, 1)), contiguous=None,
    ),
    # dresidual overwrites dr, so that dx can overwrite dy
    "AddLayerNormalizationGrad": Kernel(
        "triton.add_layer_norm_grad", _bind_add_layer_norm_grad, unsupported=_unsupported,
        where=where, inplace=((0, 1), (0, 0), (3, 0)), contiguous=None, scratch=_scratch,
    ),
}  # fmt: skip
