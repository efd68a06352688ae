"""Reductions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from onward.kernels.kernel import Kernel, KernelArguments, KernelSpec, Launch


def _dims(args: KernelArguments) -> list[int]:
    if len(args.inputs) > 1 and args.inputs[1] is not None:
        return [int(d) for d in args.inputs[1]]
    return list(range(args.x().dim()))


def _over(function: Callable[..., Any]) -> Callable[[KernelArguments], Launch]:
    def bind(args: KernelArguments) -> Launch:
        keep = bool(args.attrs.get("keepdims", 1))
        return partial(function, args.x(), _dims(args), keepdim=keep, out=args.y)

    return bind


def _extreme(function: Callable[..., Any]) -> Callable[[KernelArguments], Launch]:
    """Binds a maximum or minimum. If the result is empty nothing is computed: torch would refuse an
    empty dim even then, as with rows counted in sequences without tokens."""
    bind = _over(function)

    def bind_extreme(args: KernelArguments) -> Launch:
        return bind(args) if args.y.numel() else _nothing

    return bind_extreme


def _nothing() -> None: ...


def _bind_l2(args: KernelArguments) -> Launch:
    keep = bool(args.attrs.get("keepdims", 1))
    return partial(torch.linalg.vector_norm, args.x(), 2, _dims(args), keepdim=keep, out=args.y)


def _bind_prod(args: KernelArguments) -> Launch:
    """Binds a product over dims, one at a time from the last, since torch's operator takes one."""
    x, y = args.x(), args.y
    dims = sorted({d % x.dim() for d in _dims(args) or range(x.dim())})

    def launch() -> None:
        found = x
        for d in reversed(dims):
            found = found.prod(d)
        y.copy_(found.view(y.shape))

    return launch


def _bind_sum_square(args: KernelArguments) -> Launch:
    dims, keep = _dims(args), bool(args.attrs.get("keepdims", 1))

    def launch() -> None:
        torch.sum(args.x().square(), dims, keepdim=keep, out=args.y)

    return launch


def _input_bytes(spec: KernelSpec) -> int:
    x = spec.inputs[0]
    assert x is not None
    return 2 * x.nbytes + 1024


def _bind_argmax(args: KernelArguments) -> Launch:
    keep = bool(args.attrs.get("keepdims", 1))
    return partial(torch.argmax, args.x(), dim=args.attrs.get("axis", 0), keepdim=keep, out=args.y)


def _finite_workspace(spec: KernelSpec) -> int:
    """Bytes of the smallest and the largest number of each gradient, as doubles, stacked, and of
    their test."""
    return 64 * (4 * len(spec.inputs) + 4)


def _bind_all_finite(args: KernelArguments) -> Launch:
    """Binds the finiteness test by each gradient's smallest and largest number, which propagate
    NaN, so that no boolean per element is needed. If the host may read the norm without waiting and
    it is finite, that is enough."""
    norm, *gradients = args.inputs
    if norm is not None and norm.device.type != "cpu":
        norm = None
    given = [g for g in gradients if g is not None and g.numel()]

    def launch() -> None:
        if not given or (norm is not None and bool(norm.isfinite())):
            args.y.fill_(True)
            return
        ends = [end.double() for g in given for end in torch.aminmax(g)]
        args.y.copy_(torch.stack(ends).isfinite().all())

    return launch


KERNELS: dict[str, Kernel] = {
    "AllFinite": Kernel("aten.all_finite", _bind_all_finite, workspace=_finite_workspace),
    "ReduceSum": Kernel("aten.sum", _over(torch.sum)),
    "ReduceMean": Kernel("aten.mean", _over(torch.mean)),
    "ReduceMax": Kernel("aten.amax", _extreme(torch.amax)),
    "ReduceMin": Kernel("aten.amin", _extreme(torch.amin)),
    "ReduceL2": Kernel("aten.vector_norm", _bind_l2),
    "ReduceProd": Kernel("aten.prod", _bind_prod, workspace=_input_bytes),
    "ReduceSumSquare": Kernel("aten.square+sum", _bind_sum_square, workspace=_input_bytes),
    "ArgMax": Kernel("aten.argmax", _bind_argmax),
}
