"""Softmax and LayerNormalization, forward and backward."""

from __future__ import annotations

from functools import partial

import torch

from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch

aten = torch.ops.aten


def _last_dim(spec: KernelSpec) -> str | None:
    x = spec.inputs[0]
    assert x is not None
    last = spec.attrs.get("axis", -1) % x.rank == x.rank - 1
    return None if last else f"{spec.op} over a dim other than the last"


def _bind_softmax(args: KernelArguments) -> Launch:
    return partial(aten._softmax.out, args.x(), -1, False, out=args.y)


def _bind_log_softmax(args: KernelArguments) -> Launch:
    return partial(aten._log_softmax.out, args.x(), -1, False, out=args.y)


def _bind_layer_norm(args: KernelArguments) -> Launch:
    y, mean, invstd = args.outputs
    dim = args.attrs.get("axis", -1) % y.dim()
    bias = args.inputs[2] if len(args.inputs) > 2 else None
    return partial(
        aten.native_layer_norm.out, args.x(0), list(y.shape[dim:]), args.x(1), bias,
        float(args.attrs.get("epsilon", 1e-5)), out0=y, out1=mean, out2=invstd,
    )  # fmt: skip


def _bind_layer_norm_grad(args: KernelArguments) -> Launch:
    dy, x, scale, mean, invstd = (args.x(i) for i in range(5))
    dx, dscale, dbias = args.outputs
    dim = args.attrs.get("axis", -1) % x.dim()
    return partial(
        aten.native_layer_norm_backward.out, dy, x, list(x.shape[dim:]), mean, invstd, scale,
        scale, [True, True, True], out0=dx, out1=dscale, out2=dbias,
    )  # fmt: skip


def _results_bytes(spec: KernelSpec) -> int:
    """Bytes of workspace: the out form computes into new tensors first; the backward also keeps one
    row per thread."""
    rows = 2 * 64 * spec.outputs[-1].nbytes if spec.op.endswith("Grad") else 0
    return sum(t.nbytes for t in spec.outputs) + rows + 4096


KERNELS: dict[str, Kernel] = {
    "Softmax": Kernel(
        "aten.softmax", _bind_softmax, unsupported=_last_dim, inplace=((0, 0),), contiguous=(0,)
    ),
    "LogSoftmax": Kernel(
        "aten.log_softmax", _bind_log_softmax, unsupported=_last_dim, inplace=((0, 0),),
        contiguous=(0,),
    ),
    "LayerNormalization": Kernel(
        "aten.native_layer_norm", _bind_layer_norm, contiguous=(0,), workspace=_results_bytes
    ),
    "LayerNormalizationGrad": Kernel(
        "aten.native_layer_norm_backward", _bind_layer_norm_grad, contiguous=(0, 1, 2, 3, 4),
        workspace=_results_bytes,
    ),
}  # fmt: skip
