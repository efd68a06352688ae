"""GroupNorm, forward and backward."""

from __future__ import annotations

from functools import partial

import torch

from onward.graph.types import DType
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch

aten = torch.ops.aten


def sizes(x: torch.Tensor) -> tuple[int, int, int]:
    """The sizes of x f[N,C,*S]: N, C and the number of positions of a channel."""
    n, channels = x.shape[:2]
    return n, channels, x[0, 0].numel() if n and channels else 0


def _bind(args: KernelArguments) -> Launch:
    x, scale, bias = [*args.inputs, None, None][:3]
    assert x is not None
    y, mean, invstd = args.outputs
    return partial(
        aten.native_group_norm.out, x, scale, bias, *sizes(x), int(args.attrs["groups"]),
        float(args.attrs["epsilon"]), out0=y, out1=mean, out2=invstd,
    )  # fmt: skip


def _bind_grad(args: KernelArguments) -> Launch:
    dy, x, scale, mean, invstd = args.inputs
    assert x is not None
    dx, dscale, dbias = args.outputs
    scale = x.new_ones(x.shape[1]) if scale is None else scale  # without a scale there is no dscale
    return partial(
        aten.native_group_norm_backward.out, dy, x, mean, invstd, scale, *sizes(x),
        int(args.attrs["groups"]), [True, True, True], out0=dx, out1=dscale, out2=dbias,
    )  # fmt: skip


def _one_type(spec: KernelSpec) -> str | None:
    """Refuses low precision, in which PyTorch would also compute the statistics."""
    dtypes = {t.dtype for t in (*spec.inputs, *spec.outputs) if t is not None}
    taken = len(dtypes) == 1 and dtypes <= {DType.FLOAT, DType.DOUBLE}
    return None if taken else f"element types {sorted(map(str, dtypes))}"


def _bytes(spec: KernelSpec) -> int:
    """Bytes of workspace: the out forms compute into new tensors first."""
    return 2 * sum(t.nbytes for t in spec.outputs[1:]) + spec.outputs[0].nbytes + 4096


KERNELS: dict[str, Kernel] = {
    "GroupNorm": Kernel(
        "aten.native_group_norm", _bind, unsupported=_one_type, contiguous=(0, 1, 2),
        workspace=_bytes,
    ),
    "GroupNormGrad": Kernel(
        "aten.native_group_norm_backward", _bind_grad, unsupported=_one_type,
        contiguous=(0, 1, 2, 3, 4), workspace=_bytes,
    ),
}  # fmt: skip
