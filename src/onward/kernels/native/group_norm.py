"""GroupNorm and its gradient; each group is read and written once.

One training step of a norm of [8,256,32,32] by 32 groups alone (forward, backward and update), on
one shared core with AVX-512, 2026-11-23: 13.5 ms, eager 17.4. With aten's kernels, whose out forms
copy, 34.5 while eager took 31.0; written as LayerNormalization and a separate scale, 2.3 times
eager's.
"""

from __future__ import annotations

from onward.graph.types import DType, Type
from onward.kernels.aten.group_norm import sizes
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.native.library import library, only_f32, where


def _scratch(spec: KernelSpec) -> list[Type]:
    """The scratch: each sample's sums for dscale and dbias, f32[N,2,C]."""
    n, channels = spec.outputs[0].shape[:2]
    return [Type(DType.FLOAT, (n, 2, channels))]


def _bind(args: KernelArguments) -> Launch:
    x, scale, bias = [*args.inputs, None, None][:3]
    assert x is not None
    c, (samples, channels, places) = library(), sizes(x)
    assert c is not None
    y, mean, invstd = args.outputs
    return c.launch(
        "onward_group_norm", x=x, scale=scale, bias=bias, y=y, mean=mean, invstd=invstd,
        samples=samples, channels=channels, places=places, groups=int(args.attrs["groups"]),
        epsilon=float(args.attrs["epsilon"]),
    )  # fmt: skip


def _bind_grad(args: KernelArguments) -> Launch:
    dy, x, scale, mean, invstd = args.inputs
    assert x is not None
    c, (samples, channels, places) = library(), sizes(x)
    assert c is not None
    dx, dscale, dbias = args.outputs
    return c.launch(
        "onward_group_norm_grad", dy=dy, x=x, scale=scale, mean=mean, invstd=invstd, dx=dx,
        dscale=dscale, dbias=dbias, partial=args.scratch[0], samples=samples, channels=channels,
        places=places, groups=int(args.attrs["groups"]),
    )  # fmt: skip


KERNELS: dict[str, Kernel] = {
    "GroupNorm": Kernel(
        "native.group_norm", _bind, unsupported=only_f32, where=where, inplace=((0, 0),),
        contiguous=None,
    ),
    "GroupNormGrad": Kernel(
        "native.group_norm_grad", _bind_grad, unsupported=only_f32, where=where,
        inplace=((0, 0), (0, 1)), contiguous=None, scratch=_scratch,
    ),
}  # fmt: skip
