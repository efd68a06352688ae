"""CTCLoss by PyTorch's operators, on the CPU only: on a device they would read the lengths on the
host."""

from __future__ import annotations

import math

import torch

from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch
from onward.kernels.target import Target


def _bind_ctc_loss(args: KernelArguments) -> Launch:
    x, targets, steps, lengths = (args.x(i) for i in range(4))
    y, blank = args.y, int(args.attrs["blank"])

    def launch() -> None:
        y.copy_(torch.ops.aten._ctc_loss.Tensor(x, targets, steps, lengths, blank)[0])

    return launch


def _bind_ctc_loss_grad(args: KernelArguments) -> Launch:
    """Binds the gradient of CTC; torch's is the one with `normal`."""
    dy, x, targets, steps, lengths = (args.x(i) for i in range(5))
    dx, blank, zero = args.y, int(args.attrs["blank"]), bool(args.attrs["zero_infinity"])
    number = torch.arange(x.shape[0])[:, None]

    def launch() -> None:
        given = (targets, steps, lengths)
        loss, alpha = torch.ops.aten._ctc_loss.Tensor(x, *given, blank, zero)
        found = torch.ops.aten._ctc_loss_backward.Tensor(dy, x, *given, loss, alpha, blank, zero)
        dx.copy_(found)
        if args.attrs["normal"]:
            return
        counted = number < steps
        if zero:
            counted &= loss < math.inf
        dx.sub_(torch.where(counted[:, :, None], x.exp() * dy[:, None], 0.0))

    return launch


def _bytes(spec: KernelSpec) -> int:
    x, targets = spec.inputs[-4], spec.inputs[-3]
    assert x is not None and targets is not None
    steps, samples, _ = (int(n) for n in x.concrete.shape)  # type: ignore[arg-type]
    states = 2 * int(targets.concrete.shape[1]) + 1  # type: ignore[arg-type]
    table = steps * samples * states * int(x.dtype.itemsize)
    return 3 * table + 6 * x.nbytes + 64 * samples + 8 * steps + 4096


def _on_host(target: Target) -> str | None:
    return None if target.device == "cpu" else "its lengths are read on the host"


KERNELS: dict[str, Kernel] = {
    "CTCLoss": Kernel(
        "aten.ctc_loss", _bind_ctc_loss, contiguous=None, workspace=_bytes, where=_on_host
    ),
    "CTCLossGrad": Kernel(
        "aten.ctc_loss_backward", _bind_ctc_loss_grad, contiguous=None, workspace=_bytes,
        where=_on_host,
    ),
}  # fmt: skip
