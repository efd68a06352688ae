"""Softmax and LayerNormalization, forward and backward."""

from __future__ import annotations

from functools import partial

import torch

from onward.kernels.kernel import Kernel, Launch, Need, Use

aten = torch.ops.aten


def _last_dim(need: Need) -> str | None:
    x = need.inputs[0]
    assert x is not None
    last = need.attrs.get("axis", -1) % x.rank == x.rank - 1
    return None if last else f"{need.op} over a dim other than the last"


def _bind_softmax(use: Use) -> Launch:
    return partial(aten._softmax.out, use.x(), -1, False, out=use.y)


def _bind_log_softmax(use: Use) -> Launch:
    return partial(aten._log_softmax.out, use.x(), -1, False, out=use.y)


def _bind_layer_norm(use: Use) -> Launch:
    y, mean, invstd = use.outputs
    dim = use.attrs.get("axis", -1) % y.dim()
    bias = use.inputs[2] if len(use.inputs) > 2 else None
    return partial(
        aten.native_layer_norm.out, use.x(0), list(y.shape[dim:]), use.x(1), bias,
        float(use.attrs.get("epsilon", 1e-5)), out0=y, out1=mean, out2=invstd,
    )  # fmt: skip


def _bind_layer_norm_grad(use: Use) -> Launch:
    dy, x, scale, mean, invstd = (use.x(i) for i in range(5))
    dx, dscale, dbias = use.outputs
    dim = use.attrs.get("axis", -1) % x.dim()
    return partial(
        aten.native_layer_norm_backward.out, dy, x, list(x.shape[dim:]), mean, invstd, scale,
        scale, [True, True, True], out0=dx, out1=dscale, out2=dbias,
    )  # fmt: skip


def _results_bytes(need: Need) -> int:
    """The out form computes into fresh tensors first; the backward also keeps one row a thread."""
    rows = 2 * 64 * need.outputs[-1].nbytes if need.op.endswith("Grad") else 0
    return sum(t.nbytes for t in need.outputs) + rows + 4096


KERNELS: dict[str, Kernel] = {
    "Softmax": Kernel(
        "aten.softmax", _bind_softmax, why_not=_last_dim, inplace=((0, 0),), contiguous=(0,)
    ),
    "LogSoftmax": Kernel(
        "aten.log_softmax", _bind_log_softmax, why_not=_last_dim, inplace=((0, 0),), contiguous=(0,)
    ),
    "LayerNormalization": Kernel(
        "aten.native_layer_norm", _bind_layer_norm, contiguous=(0,), workspace=_results_bytes
    ),
    "LayerNormalizationGrad": Kernel(
        "aten.native_layer_norm_backward", _bind_layer_norm_grad, contiguous=(0, 1, 2, 3, 4),
        workspace=_results_bytes,
    ),
}  # fmt: skip
