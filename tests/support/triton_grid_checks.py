"""Grids of calls on long rows: in all dims of a grid but the first, a device takes 65535
programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

from triton_sizes import RealCall

CHECKS: dict[str, Callable[[], None]] = {}

_FLAT, _HALVES = "f[134217728]", "f[2,134217728]"
CALLS: dict[str, RealCall] = {
    "random": RealCall(
        "Dropout", "flat", (_FLAT, "i64[2]", "i64[]"), {"ratio": 0.1, "site": 3, "sample_dim": 0}
    ),
    "bias_activation": RealCall("BiasActivation", "flat", (_HALVES, _FLAT), {"activation": "gelu"}),
    "bias_activation of the gradient": RealCall(
        "BiasActivationGrad", "flat", (_HALVES, _HALVES, _FLAT), {"activation": "gelu"}
    ),
    "cross_entropy": RealCall(
        "SoftmaxCrossEntropyLossGrad", "flat", ("f[]", _HALVES, "i64[2]"), {"reduction": "mean"}
    ),
    "depthwise_conv": RealCall(
        "Conv", "flat", ("f[1,2,134217728]", "f[2,1,4]"), {"group": 2, "pads": [3, 0]}
    ),
}  # fmt: skip


class _Launched:
    """A kernel that only keeps the grids that it is launched with."""

    def __init__(self, grids: list[tuple[int, ...]]) -> None:
        self._grids = grids

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        self._grids.append(grid)
        return lambda *args, **options: None


def run_grids(name: str) -> None:
    from triton.runtime.interpreter import (  # pyright: ignore[reportMissingImports]
        InterpretedFunction,
    )

    device: Any = import_module(f"onward.kernels.triton.{name.split()[0]}_device")
    grids: list[tuple[int, ...]] = []
    names = [n for n, f in vars(device).items() if isinstance(f, InterpretedFunction)]
    kernels = {name: _Launched(grids) for name in names}
    with patch.dict(vars(device), kernels):
        CALLS[name].launch("fp32")
    assert grids and all(n <= 65535 for grid in grids for n in grid[1:]), grids


for _name in CALLS:
    CHECKS[f"grids of {_name}"] = partial(run_grids, _name)
