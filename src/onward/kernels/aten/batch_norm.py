"""BatchNormalization, forward and backward."""

from __future__ import annotations

import torch

from onward.graph.ops.batch_norm import EPSILON, MOMENTUM
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch

aten = torch.ops.aten


def _bind_batch_norm(args: KernelArguments) -> Launch:
    x, scale, bias, mean, var = (args.x(i) for i in range(5))
    y, epsilon = args.y, float(args.attrs.get("epsilon", EPSILON))

    def normalise(mean: torch.Tensor, var: torch.Tensor) -> None:
        none = y.new_empty(0, dtype=mean.dtype)
        aten.native_batch_norm.out(
            x, scale, bias, mean, var, False, 0.0, epsilon, out=y, save_mean=none,
            save_invstd=none.clone(),
        )  # fmt: skip

    if not args.attrs.get("training_mode", 0):
        return lambda: normalise(mean, var)
    momentum = float(args.attrs.get("momentum", MOMENTUM))

    def launch() -> None:
        now = torch.batch_norm_update_stats(x, None, None, 0.0)  # the variance divided by n
        normalise(*now)
        for batch, was, new in zip(now, (mean, var), args.outputs[1:], strict=True):
            if momentum == 0.0:
                new.copy_(batch)
            else:
                torch.mul(was, momentum, out=new).add_(batch.to(new.dtype), alpha=1.0 - momentum)

    return launch


def _bind_batch_norm_grad(args: KernelArguments) -> Launch:
    dy, x, scale, mean, var = (args.x(i) for i in range(5))
    dx, dscale, dbias = args.outputs
    training = bool(args.attrs.get("training_mode", 0))
    epsilon = float(args.attrs.get("epsilon", EPSILON))

    def launch() -> None:
        invstd = (var + epsilon).rsqrt_()
        given = (None, None) if training else (mean, var)
        aten.native_batch_norm_backward.out(  # on CUDA it wants mean and 1/std in any mode
            dy, x, scale, *given, mean, invstd, training, epsilon, [True, True, True], out0=dx,
            out1=dscale, out2=dbias,
        )  # fmt: skip

    return launch


def _one_type(spec: KernelSpec) -> str | None:
    """Refuses mixed types: PyTorch's operators for mixed types round at other places."""
    dtypes = {t.dtype for t in spec.inputs if t is not None}
    return None if len(dtypes) == 1 else f"element types {sorted(map(str, dtypes))}"


def _bytes(spec: KernelSpec) -> int:
    """Bytes of workspace: the out forms compute into new tensors first; statistics are in double
    precision."""
    channels = spec.outputs[-1].nbytes
    return sum(t.nbytes for t in spec.outputs) + 16 * channels + 4096


KERNELS: dict[str, Kernel] = {
    "BatchNormalization": Kernel(
        "aten.native_batch_norm", _bind_batch_norm, unsupported=_one_type,
        contiguous=(0, 1, 2, 3, 4), workspace=_bytes,
    ),
    "BatchNormalizationGrad": Kernel(
        "aten.native_batch_norm_backward", _bind_batch_norm_grad, unsupported=_one_type,
        contiguous=(0, 1, 2, 3, 4), workspace=_bytes,
    ),
}  # fmt: skip
