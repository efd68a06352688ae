"""RMS normalization, alone and with the residual sum and dropout before it, in one pass over
memory; and the gradient of both in one pass, whose sums over rows are added in a fixed order.

Bytes per element in f32: 8 forward and 12 backward, with the sum 16 and 16; the operators of the
ops' bodies, one after another, move 28, 88, 40 and 100. With x, y, dy and dx of bf16 beside an f32
sum it is 12 forward and 16 backward.
"""

from __future__ import annotations

import math
from typing import Any

import torch

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
_MOST_DIMS = 5


def _unsupported(spec: KernelSpec) -> str | None:
    y = spec.outputs[0]
    if not 1 <= y.rank <= _MOST_DIMS:
        return f"{y.rank} dims"
    features = y.shape[-1]
    if not isinstance(features, int):
        return "an open width"
    if features > WIDEST:
        return f"rows of more than {WIDEST} numbers"
    if features == 0:
        return "rows of no numbers"
    if spec.attrs.get("ratio", 0.0) >= 1.0:
        return "ratio 1"
    floating = (t for t in (*spec.inputs, *spec.outputs) if t is not None and t.is_floating)
    return other_types(floating)


def _scratch(spec: KernelSpec) -> list[Type]:
    """Each program's sums for dscale, f32[programs, D]."""
    *outer, features = spec.outputs[0].shape
    rows = product(tuple(outer))
    assert isinstance(rows, int) and isinstance(features, int)
    # an upper bound: smaller batches of the same plan use at most as many programs
    programs = min(_PROGRAMS, max(1, math.ceil(rows / tile(features)[1])))
    return [Type(DType.FLOAT, (programs, features))]


def _bind(args: KernelArguments) -> Launch:
    return _forward(args, args.x(1), None)


def _bind_add(args: KernelArguments) -> Launch:
    return _forward(args, args.x(2), args.x(1))


def _forward(args: KernelArguments, scale: torch.Tensor, residual: torch.Tensor | None) -> Launch:
    from onward.kernels.triton import rms_norm_device as device

    x, y = args.x(0), args.y
    *outer, features = x.shape
    rows = math.prod(outer)
    width, block = tile(features)
    tensors, flags = norm_mask(args, outer, 3)
    adds = residual is not None
    sums = [residual, args.outputs[1]] if adds else [x, y]
    kernel: Any = device.rms_norm
    epsilon, site = float(args.attrs["epsilon"]), int(args.attrs.get("site", 0))
    grid = (math.ceil(rows / block),)

    def launch() -> None:
        if rows:
            kernel[grid](
                x, scale, y, *sums, *tensors, rows, *outer_sizes(outer), site, factor(args),
                epsilon, FEATURES=features, WIDTH=width, ROWS=block, ADDS=adds,
                num_warps=warps(width), **flags,
            )  # fmt: skip

    return launch


def _bind_grad(args: KernelArguments) -> Launch:
    dy, r, scale = (args.x(i) for i in range(3))
    return _gradient(args, dy, None, r, scale, 3)


def _bind_add_grad(args: KernelArguments) -> Launch:
    return _gradient(args, args.x(0), args.inputs[1], args.x(2), args.x(3), 4)


def _gradient(
    args: KernelArguments, dy: torch.Tensor, dr: torch.Tensor | None, r: torch.Tensor,
    scale: torch.Tensor, seed_at: int,
) -> Launch:  # fmt: skip
    from onward.kernels.triton import rms_norm_device as device

    dresidual, dscale, *rest = args.outputs
    dx = rest[0] if rest else None
    *outer, features = r.shape
    rows = math.prod(outer)
    width, block = tile(features)
    programs, blocks = programs_of(rows, features, _PROGRAMS)
    (partial,) = args.scratch  # f32[programs,D] or more
    tensors, flags = norm_mask(args, outer, seed_at)
    gradient: Any = device.rms_norm_gradient
    joined: Any = device.join_sums
    epsilon, site = float(args.attrs["epsilon"]), int(args.attrs.get("site", 0))

    def launch() -> None:
        gradient[(programs,)](
            dy, dy if dr is None else dr, r, scale, dresidual, dresidual if dx is None else dx,
            partial, *tensors, rows, blocks, *outer_sizes(outer), site, factor(args), epsilon,
            FEATURES=features, WIDTH=width, ROWS=block, HAS_DR=dr is not None,
            HAS_DX=dx is not None, num_warps=warps(width), **flags,
        )  # fmt: skip
        joined[(math.ceil(features / device.JOINED),)](partial, dscale, programs, FEATURES=features)

    return launch


KERNELS: dict[str, Kernel] = {
    "RMSNorm": Kernel(
        "triton.rms_norm", _bind, unsupported=_unsupported, where=where, inplace=((0, 0),),
        contiguous=None,
    ),
    "RMSNormGrad": Kernel(
        "triton.rms_norm_grad", _bind_grad, unsupported=_unsupported, where=where,
        inplace=((0, 0), (0, 1)), contiguous=None, scratch=_scratch,
    ),
    "AddRMSNorm": Kernel(
        "triton.add_rms_norm", _bind_add, unsupported=_unsupported, where=where,
        inplace=((0, 0), (1, 1)), contiguous=None,
    ),
    # dresidual overwrites dr, so that dx can overwrite dy
    "AddRMSNormGrad": Kernel(
        "triton.add_rms_norm_grad", _bind_add_grad, unsupported=_unsupported, where=where,
        inplace=((0, 1), (0, 0), (2, 0)), contiguous=None, scratch=_scratch,
    ),
}  # fmt: skip
