"""RMSNorm and its gradient, alone or fused with the residual sum and dropout, in the same tiles of
rows as norm.py.

[1024,512] with x and y, dy and dx in f32, bf16 and fp16 beside an f32 sum, on 2 threads of an AMD
EPYC (AVX-512), 2026-11-24: sum and norm 54, 60 and 84 us; the gradient 71, 74 and 141.
"""

from __future__ import annotations

from typing import Any

import torch

from onward.graph.types import DType, Type
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.library import library, only_f32, where
from onward.kernels.native.norm import mask_of, of_an_f32_sum, tiles_of


def _scratch(spec: KernelSpec) -> list[Type]:
    """The scratch: each tile's sums for dscale, f32[tiles, D]."""
    return [Type(DType.FLOAT, (tiles_of(spec), spec.outputs[1].numel))]


def _bind(args: KernelArguments) -> Launch:
    x, scale = args.x(0), args.x(1)
    c = library()
    assert c is not None
    return c.launch(
        "onward_rms_norm", x=x, scale=scale, y=args.y, rows=x.numel() // max(scale.numel(), 1),
        features=scale.numel(), epsilon=float(args.attrs["epsilon"]),
    )  # fmt: skip


def _bind_add(args: KernelArguments) -> Launch:
    x, residual, scale = (args.x(i) for i in range(3))
    y, r = args.outputs
    c = library()
    assert c is not None
    return c.launch(
        "onward_add_rms_norm", x=x, residual=residual, scale=scale, y=y, r=r,
        rows=x.numel() // max(scale.numel(), 1), features=scale.numel(),
        epsilon=float(args.attrs["epsilon"]), **mask_of(args, 3),
    )  # fmt: skip


def _bind_grad(args: KernelArguments) -> Launch:
    dy, x, scale = (args.x(i) for i in range(3))
    return _grad(args, [dy, None, x, scale], mask_of(args, 3))


def _bind_add_grad(args: KernelArguments) -> Launch:
    return _grad(args, args.inputs[:4], mask_of(args, 4))


def _grad(args: KernelArguments, inputs: list[torch.Tensor | None], mask: dict[str, Any]) -> Launch:
    dy, dr, r, scale = inputs
    dresidual, dscale, *rest = args.outputs
    features, (partial,) = dscale.numel(), args.scratch
    c = library()
    assert c is not None
    return c.launch(
        "onward_add_rms_norm_grad", dy=dy, dr=dr, r=r, scale=scale, dresidual=dresidual,
        dscale=dscale, dx=rest[0] if rest else None, partial=partial, tiles=partial.shape[0],
        rows=dresidual.numel() // max(features, 1), features=features,
        epsilon=float(args.attrs["epsilon"]), **mask,
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {
    "RMSNorm": Kernel(
        "native.rms_norm", _bind, unsupported=only_f32, where=where, inplace=((0, 0),),
        contiguous=None,
    ),
    "RMSNormGrad": Kernel(
        "native.rms_norm_grad", _bind_grad, unsupported=only_f32, where=where,
        inplace=((0, 0), (0, 1)), contiguous=None, scratch=_scratch,
    ),
    "AddRMSNorm": Kernel(
        "native.add_rms_norm", _bind_add, unsupported=of_an_f32_sum, where=where,
        inplace=((0, 0), (1, 1)), contiguous=None,
    ),
    # dresidual overwrites dr, so that dx can overwrite dy
    "AddRMSNormGrad": Kernel(
        "native.add_rms_norm_grad", _bind_add_grad, unsupported=of_an_f32_sum, where=where,
        inplace=((0, 1), (0, 0), (2, 0)), contiguous=None, scratch=_scratch,
    ),
}  # fmt: skip
