"""Convolutions with a filter for each channel by Triton's interpreter, and their gradients, beside
PyTorch in fp64: lengths and taps around the blocks, dilations, uneven pads."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from triton_calls import DTYPES, launch, near

from onward.kernels import torch_dtype

CHECKS: dict[str, Callable[[], None]] = {}
SAMPLES, CHANNELS = 2, 3


def _filters(
    length: int, taps: int, dilation: int, pads: tuple[int, int], bias: bool, dtype: torch.dtype
) -> None:
    g = torch.Generator().manual_seed(length * taps)
    x = torch.randn(SAMPLES, CHANNELS, length, generator=g).to(dtype)
    w = torch.randn(CHANNELS, 1, taps, generator=g).to(dtype)
    b = torch.randn(CHANNELS, generator=g).to(dtype) if bias else None
    exact = [t.double().requires_grad_() for t in (x, w)]
    with torch.enable_grad():
        padded = F.pad(exact[0], pads)
        wide = None if b is None else b.double()
        y = F.conv1d(padded, exact[1], wide, dilation=dilation, groups=CHANNELS)
        dy = torch.randn(y.shape, generator=g).to(dtype)
        dx, dw = torch.autograd.grad(y, exact, dy.double())
    attrs: dict[str, Any] = {"dilations": [dilation], "pads": [*pads], "group": CHANNELS}

    made = torch.empty(y.shape, dtype=dtype)
    launch("Conv", attrs, [x, w, b], [made])
    near("y", made, y.detach())
    rest = length - (y.shape[2] - 1 + (taps - 1) * dilation + 1 - sum(pads))
    more = {"output_padding": [rest]} if rest else {}
    made = torch.empty(x.shape, dtype=dtype)
    launch("ConvTranspose", {**attrs, **more}, [dy, w], [made])
    near("dx", made, dx)
    made = torch.empty(w.shape, dtype=dtype)
    launch("ConvWeightGrad", {**attrs, "kernel_shape": [taps]}, [dy, x], [made])
    near("dw", made, dw)


for _length, _taps, _dilation in itertools.product((1, 16, 67, 1100), (1, 4, 31), (1, 2)):
    for _pads in ((0, 0), (_taps - 1, _taps - 1), ((_taps - 1) * _dilation, 0), (1, 5)):
        if _length + sum(_pads) <= (_taps - 1) * _dilation:
            continue
        for _dtype in DTYPES:
            _name = f"Conv ConvTranspose ConvWeightGrad {_length} {_taps} {_dilation} {_pads}"
            CHECKS[f"filters {_name} {_dtype.name.lower()}"] = partial(
                _filters, _length, _taps, _dilation, _pads, _length != 67, torch_dtype(_dtype)
            )

__all__ = ["CHECKS"]
