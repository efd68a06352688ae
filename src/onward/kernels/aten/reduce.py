"""Reductions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from onward.kernels.kernel import Kernel, Launch, Need, Use


def _dims(use: Use) -> list[int]:
    if len(use.inputs) > 1 and use.inputs[1] is not None:
        return [int(d) for d in use.inputs[1]]
    return list(range(use.x().dim()))


def _over(function: Callable[..., Any]) -> Callable[[Use], Launch]:
    def bind(use: Use) -> Launch:
        keep = bool(use.attrs.get("keepdims", 1))
        return partial(function, use.x(), _dims(use), keepdim=keep, out=use.y)

    return bind


def _bind_l2(use: Use) -> Launch:
    keep = bool(use.attrs.get("keepdims", 1))
    return partial(torch.linalg.vector_norm, use.x(), 2, _dims(use), keepdim=keep, out=use.y)


def _bind_argmax(use: Use) -> Launch:
    keep = bool(use.attrs.get("keepdims", 1))
    return partial(torch.argmax, use.x(), dim=use.attrs.get("axis", 0), keepdim=keep, out=use.y)


def _finite_workspace(need: Need) -> int:
    """The largest magnitudes, one by one, as doubles, stacked, and what is asked of them."""
    return 64 * (4 * len(need.inputs) + 4)


def _bind_all_finite(use: Use) -> Launch:
    """The largest magnitudes, which carry NaN on, in place of a boolean for each number."""
    norm, *gradients = use.inputs
    given = [g for g in gradients if g is not None and g.numel()]

    def launch() -> None:
        if not given or (norm is not None and bool(norm.isfinite())):
            use.y.fill_(True)
            return
        largest = [torch.linalg.vector_norm(g, torch.inf).double() for g in given]
        use.y.copy_(torch.stack(largest).isfinite().all())

    return launch


KERNELS: dict[str, Kernel] = {
    "AllFinite": Kernel("aten.all_finite", _bind_all_finite, workspace=_finite_workspace),
    "ReduceSum": Kernel("aten.sum", _over(torch.sum)),
    "ReduceMean": Kernel("aten.mean", _over(torch.mean)),
    "ReduceMax": Kernel("aten.amax", _over(torch.amax)),
    "ReduceMin": Kernel("aten.amin", _over(torch.amin)),
    "ReduceL2": Kernel("aten.vector_norm", _bind_l2),
    "ArgMax": Kernel("aten.argmax", _bind_argmax),
}
