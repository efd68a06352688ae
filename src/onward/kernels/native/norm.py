"""LayerNormalization and its gradient, alone or fused with the residual sum and dropout.

A row is read and written once. The rounding of the mean is corrected in the variance's pass; dscale
and dbias are summed in tiles of rows, which are the same for any number of threads, so that every
bit is.

us per call and GB/s on 2 threads of an AMD EPYC (AVX-512), warm caches, 2026-11-21, from
`benchmarks/kernel_times.py`; after the slash aten's norm, or sum, norm and dropout in separate
kernels:

                          [1024,512]           [700,200]
    norm                  64 / 114  66 GB/s    34 / 46  34 GB/s
    its gradient          73 / 133  87         42 / 88  40
    sum, dropout, norm   135 / 160  62         54 / 64  42
    its gradient         115 / 160  91         44 / 51  51

[1024,512] with x and y, dy and dx in f32, bf16 and fp16 beside an f32 sum, another EPYC (AVX-512)
with 2 threads, 2026-11-24: sum, dropout, norm 91, 104 and 141 us; the gradient 75, 90 and 200. The
gain is that no separate passes cast.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from onward.graph.ops.norm import has_dx
from onward.graph.types import DType, Type, product
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.library import library, not_f32, not_one_element, only_f32, where
from onward.kernels.native.random import mask_arguments, row_arguments

_TILES = 32  # tiles of rows at most, which limits the threads that share a gradient
_TILE_ROWS = 16  # rows of a tile at least, since a tile's sums are written and read once more


def tiles_of(spec: KernelSpec) -> int:
    """The number of tiles of rows in a gradient whose second output is dscale."""
    scale = spec.outputs[1]
    rows = product(spec.outputs[0].shape[: spec.outputs[0].rank - scale.rank])
    assert isinstance(rows, int)
    return max(1, min(_TILES, math.ceil(rows / _TILE_ROWS)))


def _scratch(spec: KernelSpec) -> list[Type]:
    """The scratch: each tile's sums for dscale and dbias, f32[tiles, 2, D]."""
    return [Type(DType.FLOAT, (tiles_of(spec), 2, spec.outputs[1].numel))]


def of_an_f32_sum(spec: KernelSpec) -> str | None:
    """`Kernel.unsupported` of a norm with its sum, and of its gradient. All tensors must be f32,
    except that y and dy, and x and dx, may be bf16 or fp16.

    Dropout of everything (ratio 1) is refused: it has no factor 1 / (1 - ratio); the body writes
    zeros.
    """
    if spec.attrs.get("ratio", 0.0) >= 1.0:
        return "ratio 1"
    y_or_dy, x_or_dx, *others = _parts(spec)
    return not_f32(others) or not_one_element((y_or_dy, x_or_dx), (DType.FLOAT,))


def _parts(spec: KernelSpec) -> list[Type | None]:
    """The types of a call, starting with those that may be low: y and x, in the gradient dy and
    dx."""
    inputs, outputs = list(spec.inputs), list(spec.outputs)
    if not spec.op.endswith("Grad"):
        return [outputs.pop(0), inputs.pop(0), *inputs, *outputs]
    dx = outputs.pop() if has_dx(spec.attrs) else None
    return [inputs.pop(0), dx, *inputs, *outputs]


def mask_of(args: KernelArguments, seed_at: int) -> dict[str, Any]:
    """The dropout of a call as arguments of the C functions; without dropout, no seed and a mask
    that keeps everything."""
    outer = list(args.y.shape[:-1])
    ratio = float(args.attrs.get("ratio", 0.0))
    if ratio == 0.0:
        return _KEEPS_ALL | {"sizes": outer, "rank": len(outer)}
    site, threshold, factor = mask_arguments(args, ratio)
    return row_arguments(args, outer, args.inputs[seed_at + 1 :]) | {
        "seed": args.x(seed_at), "site": site, "threshold": threshold, "factor": factor,
    }  # fmt: skip


_KEEPS_ALL: dict[str, Any] = {
    "seed": None, "offset": None, "site": 0, "threshold": 0, "factor": 1.0, "sample_dim": -1,
    "coordinates": None, "width": 0,
}  # fmt: skip


def _bind_layer_norm(args: KernelArguments) -> Launch:
    x, scale = args.x(0), args.x(1)
    bias = args.inputs[2] if len(args.inputs) > 2 else None
    features = scale.numel()
    c = library()
    assert c is not None
    y, mean, invstd = args.outputs
    return c.launch(
        "onward_layer_norm", x=x, scale=scale, bias=bias, y=y, mean=mean, invstd=invstd,
        rows=x.numel() // max(features, 1), features=features,
        epsilon=float(args.attrs.get("epsilon", 1e-5)),
    )  # fmt: skip


def _bind_layer_norm_grad(args: KernelArguments) -> Launch:
    dy, x, scale, mean, invstd = (args.x(i) for i in range(5))
    return _grad(args, [dy, None, x, scale, mean, invstd], mask_of(args, 5))


def _bind_add_layer_norm(args: KernelArguments) -> Launch:
    x, residual, scale = (args.x(i) for i in range(3))
    bias = args.inputs[3] if len(args.inputs) > 3 else None
    features = scale.numel()
    c = library()
    assert c is not None
    y, mean, invstd, r = args.outputs
    return c.launch(
        "onward_add_layer_norm", x=x, residual=residual, scale=scale, bias=bias, y=y, mean=mean,
        invstd=invstd, r=r, rows=x.numel() // max(features, 1), features=features,
        epsilon=float(args.attrs.get("epsilon", 1e-5)), **mask_of(args, 4),
    )  # fmt: skip


def _bind_add_layer_norm_grad(args: KernelArguments) -> Launch:
    return _grad(args, args.inputs[:6], mask_of(args, 6))


def _grad(args: KernelArguments, inputs: list[torch.Tensor | None], mask: dict[str, Any]) -> Launch:
    dy, dr, r, scale, mean, invstd = inputs
    dresidual, dscale, dbias, *rest = args.outputs
    features, (partial,) = dscale.numel(), args.scratch
    c = library()
    assert c is not None
    return c.launch(
        "onward_add_layer_norm_grad", dy=dy, dr=dr, r=r, scale=scale, mean=mean, invstd=invstd,
        dresidual=dresidual, dscale=dscale, dbias=dbias, dx=rest[0] if rest else None,
        partial=partial, tiles=partial.shape[0], rows=dresidual.numel() // max(features, 1),
        features=features, **mask,
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {
    "LayerNormalization": Kernel(
        "native.layer_norm", _bind_layer_norm, unsupported=only_f32, where=where,
        inplace=((0, 0),), contiguous=None,
    ),
    "LayerNormalizationGrad": Kernel(
        "native.layer_norm_grad", _bind_layer_norm_grad, unsupported=only_f32, where=where,
        inplace=((0, 0), (0, 1)), contiguous=None, scratch=_scratch,
    ),
    "AddLayerNormalization": Kernel(
        "native.add_layer_norm", _bind_add_layer_norm, unsupported=of_an_f32_sum,
        where=where, inplace=((0, 0), (3, 1)), contiguous=None,
    ),
    # dresidual overwrites dr, so that dx can overwrite dy
    "AddLayerNormalizationGrad": Kernel(
        "native.add_layer_norm_grad", _bind_add_layer_norm_grad,
        unsupported=of_an_f32_sum, where=where, inplace=((0, 1), (0, 0), (3, 0)),
        contiguous=None, scratch=_scratch,
    ),
}  # fmt: skip
