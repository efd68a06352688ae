"""Optimizer updates in place, by torch's own single-pass kernels."""

from __future__ import annotations

from functools import partial

import torch

from onward.graph.types import DType, Type
from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch


def _scaled_scratch(spec: KernelSpec, scale: int) -> list[Type]:
    """Scratch for the scaled gradient, if input `scale` is present."""
    g = spec.inputs[1]
    assert g is not None
    return [g] if scale < len(spec.inputs) and spec.inputs[scale] is not None else []


def _adam_scratch(spec: KernelSpec) -> list[Type]:
    return [Type(DType.FLOAT, ()), *_scaled_scratch(spec, 11)]


def _sgd_scratch(spec: KernelSpec) -> list[Type]:
    return _scaled_scratch(spec, 8)


def _mixed(spec: KernelSpec) -> str | None:
    """Refuses mixed types: torch's kernels need parameter, gradient and state of one dtype."""
    p, g = spec.inputs[:2]
    assert p is not None and g is not None
    if p.dtype == g.dtype:
        return None
    return f"a gradient of {g.dtype.name.lower()} for a parameter of {p.dtype.name.lower()}"


def _in_place(
    args: KernelArguments, pairs: tuple[tuple[int, int], ...]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs (output, input) whose output lies in other memory, so that the input is copied there
    before the update."""
    return [
        (args.outputs[o], args.x(i))
        for o, i in pairs
        if args.outputs[o].data_ptr() != args.x(i).data_ptr()
    ]


def _scaled(
    args: KernelArguments, scale: int, scratch: list[torch.Tensor]
) -> tuple[torch.Tensor, Launch]:
    """The gradient to update with, and the call that computes it.

    torch's own `grad_scale` would divide, and would overwrite the gradient.
    """
    if not scratch:
        return args.x(1), lambda: None
    return scratch[0], partial(torch.mul, args.x(1), args.x(scale), out=scratch[0])


aten = torch.ops.aten
_ADAM_PAIRS = ((0, 0), (1, 2), (2, 3), (3, 4))


def _bind_adam(args: KernelArguments) -> Launch:
    p, m, v, *most = args.outputs
    hyper, step = [args.x(i) for i in range(5, 10)], args.x(10)
    copies = _in_place(args, _ADAM_PAIRS[: len(args.outputs)])
    count = args.scratch[0]
    g, scaled = _scaled(args, 11, args.scratch[1:])
    update = aten._fused_adamw_ if args.attrs["decoupled"] else aten._fused_adam_

    def launch() -> None:
        for target, source in copies:
            target.copy_(source)
        count.fill_(int(step))  # no copy from the host, which would wait for it
        scaled()
        lr, beta1, beta2, eps, decay = (float(x) for x in hyper)
        update(
            [p], [g], [m], [v], most, [count], lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay,
            eps=eps, amsgrad=bool(most), maximize=False,
        )  # fmt: skip

    return launch


def _bind_sgd(args: KernelArguments) -> Launch:
    p, hyper, step = args.outputs[0], [args.x(i) for i in range(3, 7)], args.x(7)
    g, scaled = _scaled(args, 8, args.scratch)
    velocity = args.outputs[1] if len(args.outputs) > 1 else None
    pairs = ((0, 0),) if velocity is None else ((0, 0), (1, 2))
    copies = _in_place(args, pairs)
    nesterov = velocity is not None and bool(args.attrs["nesterov"])

    def launch() -> None:
        for target, source in copies:
            target.copy_(source)
        scaled()
        lr, momentum, dampening, decay = (float(x) for x in hyper)
        aten._fused_sgd_(
            [p], [g], [velocity] if velocity is not None else [], weight_decay=decay,
            momentum=momentum if velocity is not None else 0.0, lr=lr, dampening=dampening,
            nesterov=nesterov, maximize=False,
            is_first_step=velocity is not None and int(step) == 1,
        )  # fmt: skip

    return launch


KERNELS: dict[str, Kernel] = {
    "AdamUpdate": Kernel(
        "aten.fused_adam", _bind_adam, unsupported=_mixed, inplace=_ADAM_PAIRS, contiguous=None,
        scratch=_adam_scratch, host=(5, 6, 7, 8, 9, 10),
    ),
    "SGDUpdate": Kernel(
        "aten.fused_sgd", _bind_sgd, unsupported=_mixed, inplace=((0, 0), (1, 2)), contiguous=None,
        scratch=_sgd_scratch, host=(3, 4, 5, 6, 7),
    ),
}  # fmt: skip
