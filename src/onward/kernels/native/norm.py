"""LayerNormalization and its gradient, alone or with the residual sum and dropout around them.

A row is read and written once. The mean is corrected in the variance's pass; dscale and dbias are
summed by tiles of rows. The tiles are the same for any number of threads, and so is every bit.

us a call and GB/s on 2 threads of an AMD EPYC (AVX-512), warm caches, 2026-11-21, from
`benchmarks/kernels.py`; beside them aten's norm, or the sum, norm and dropout in kernels apart:

                          [1024,512]           [700,200]
    norm                  64 / 114  66 GB/s    34 / 46  34 GB/s
    its gradient          73 / 133  87         42 / 88  40
    sum, dropout, norm   135 / 160  62         54 / 64  42
    its gradient         115 / 160  91         44 / 51  51
"""

from __future__ import annotations

import math
from typing import Any

import torch

from onward.graph.types import DType, Type, product
from onward.kernels.kernel import Kernel, Launch, Need, Use
from onward.kernels.native.library import library, only_f32, where
from onward.kernels.native.random import mask_arguments, row_arguments

_TILES = 32  # of rows: more threads than this share the gradient's work no further
_TILE_ROWS = 16  # at least: a tile's sums are written and read once more


def _scratch(need: Need) -> list[Type]:
    """A tile's sums for dscale and dbias, f32[tiles, 2, D]."""
    scale = need.outputs[1]
    rows = product(need.outputs[0].shape[: need.outputs[0].rank - scale.rank])
    assert isinstance(rows, int)
    tiles = max(1, min(_TILES, math.ceil(rows / _TILE_ROWS)))
    return [Type(DType.FLOAT, (tiles, 2, scale.numel))]


def _only_f32_and_some_kept(need: Need) -> str | None:
    """Dropout of everything (ratio 1) has no factor 1 / (1 - ratio): the body writes zeros."""
    return "ratio 1" if need.attrs.get("ratio", 0.0) >= 1.0 else only_f32(need)


def _mask(use: Use, seed_at: int) -> dict[str, Any]:
    """Dropout as the C functions take it; without it no seed, and a mask that keeps everything."""
    outer = list(use.y.shape[:-1])
    ratio = float(use.attrs.get("ratio", 0.0))
    if ratio == 0.0:
        return _KEEPS_ALL | {"sizes": outer, "rank": len(outer)}
    site, threshold, factor = mask_arguments(use, ratio)
    return row_arguments(use, outer, use.inputs[seed_at + 1 :]) | {
        "seed": use.x(seed_at), "site": site, "threshold": threshold, "factor": factor,
    }  # fmt: skip


_KEEPS_ALL: dict[str, Any] = {
    "seed": None, "offset": None, "site": 0, "threshold": 0, "factor": 1.0, "sample_dim": -1,
    "coordinates": None, "width": 0,
}  # fmt: skip


def _bind_layer_norm(use: Use) -> Launch:
    x, scale = use.x(0), use.x(1)
    bias = use.inputs[2] if len(use.inputs) > 2 else None
    features = scale.numel()
    c = library()
    assert c is not None
    y, mean, invstd = use.outputs
    return c.launch(
        "onward_layer_norm", x=x, scale=scale, bias=bias, y=y, mean=mean, invstd=invstd,
        rows=x.numel() // max(features, 1), features=features,
        epsilon=float(use.attrs.get("epsilon", 1e-5)),
    )  # fmt: skip


def _bind_layer_norm_grad(use: Use) -> Launch:
    dy, x, scale, mean, invstd = (use.x(i) for i in range(5))
    return _grad(use, [dy, None, x, scale, mean, invstd], _mask(use, 5))


def _bind_add_layer_norm(use: Use) -> Launch:
    x, residual, scale = (use.x(i) for i in range(3))
    bias = use.inputs[3] if len(use.inputs) > 3 else None
    features = scale.numel()
    c = library()
    assert c is not None
    y, mean, invstd, r = use.outputs
    return c.launch(
        "onward_add_layer_norm", x=x, residual=residual, scale=scale, bias=bias, y=y, mean=mean,
        invstd=invstd, r=r, rows=x.numel() // max(features, 1), features=features,
        epsilon=float(use.attrs.get("epsilon", 1e-5)), **_mask(use, 4),
    )  # fmt: skip


def _bind_add_layer_norm_grad(use: Use) -> Launch:
    return _grad(use, use.inputs[:6], _mask(use, 6))


def _grad(use: Use, inputs: list[torch.Tensor | None], mask: dict[str, Any]) -> Launch:
    dy, dr, r, scale, mean, invstd = inputs
    dresidual, dscale, dbias, *rest = use.outputs
    features, (partial,) = dscale.numel(), use.scratch
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
        "native.layer_norm", _bind_layer_norm, why_not=only_f32, where=where,
        inplace=((0, 0),), contiguous=None,
    ),
    "LayerNormalizationGrad": Kernel(
        "native.layer_norm_grad", _bind_layer_norm_grad, why_not=only_f32, where=where,
        inplace=((0, 0), (0, 1)), contiguous=None, scratch=_scratch,
    ),
    "AddLayerNormalization": Kernel(
        "native.add_layer_norm", _bind_add_layer_norm, why_not=_only_f32_and_some_kept,
        where=where, inplace=((0, 0), (3, 1)), contiguous=None,
    ),
    # dresidual rather over dr, so that dy is left to dx
    "AddLayerNormalizationGrad": Kernel(
        "native.add_layer_norm_grad", _bind_add_layer_norm_grad, why_not=_only_f32_and_some_kept,
        where=where, inplace=((0, 1), (0, 0), (3, 0)), contiguous=None, scratch=_scratch,
    ),
}  # fmt: skip
