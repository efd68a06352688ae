"""Convolutions, pooling and sampling in torch."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from nodes.torch_table import NoForm, T, ints, row

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_AVERAGE = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_UNPOOL = {1: F.max_unpool1d, 2: F.max_unpool2d, 3: F.max_unpool3d}


class _Window:
    """The strides, dilations and pads of a window; ceil: what is padded behind the end for the
    windows that reach over it."""

    def __init__(self, a: Any, x: T, kernel: list[int]) -> None:
        rank = len(kernel)
        self.kernel, self.strides = kernel, a.strides or [1] * rank
        self.dilations = a.dilations or [1] * rank
        pads = a.pads or [0] * 2 * rank
        self.low, self.high = list(pads[:rank]), list(pads[rank:])
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, self.dilations, strict=True)]
        auto = a.auto_pad or "NOTSET"
        if auto.startswith("SAME"):
            for i, n in enumerate(x.shape[2:]):
                s = self.strides[i]
                need = max(0, (math.ceil(n / s) - 1) * s + reach[i] - n)
                few, more = need // 2, need - need // 2
                self.low[i], self.high[i] = (few, more) if auto == "SAME_UPPER" else (more, few)
        self.ceil = [0] * rank
        if a.ceil_mode:
            for i, n in enumerate(x.shape[2:]):
                over = (n + self.low[i] + self.high[i] - reach[i]) % self.strides[i]
                more = self.strides[i] - over if over else 0
                last = n + self.low[i] + self.high[i] + more - reach[i]
                self.ceil[i] = more if last < n + self.low[i] else -over

    @property
    def even(self) -> bool:
        return self.low == self.high and not any(self.ceil)

    def pads(self, ceil: bool = True) -> list[int]:
        """For F.pad."""
        found: list[int] = []
        for low, high, more in zip(self.low, self.high, self.ceil, strict=True):
            found = [low, high + (more if ceil else 0), *found]
        return found


@row("Conv")
def _conv(a: Any, x: T, w: T, bias: T | None = None) -> T:
    p = _Window(a, x, list(w.shape[2:]))
    function = _CONV[x.dim() - 2]
    if p.even:
        return function(x, w, bias, p.strides, p.low, p.dilations, a.group)
    return function(F.pad(x, p.pads()), w, bias, p.strides, 0, p.dilations, a.group)


@row("ConvTranspose")
def _conv_transpose(a: Any, x: T, w: T, bias: T | None = None) -> T:
    rank = x.dim() - 2
    p = _Window(a, x, list(w.shape[2:]))
    more = a.output_padding or [0] * rank
    sizes = [
        s * (n - 1) + d * (k - 1) + 1
        for s, n, d, k in zip(p.strides, x.shape[2:], p.dilations, p.kernel, strict=True)
    ]
    wanted = a.output_shape and a.output_shape[-rank:]
    if wanted is None and a.auto_pad.startswith("SAME"):
        wanted = [n * s for n, s in zip(x.shape[2:], p.strides, strict=True)]
    if wanted is not None:
        for i, want in enumerate(wanted):
            total = sizes[i] + more[i] - want
            half = total // 2
            first = half if a.auto_pad == "SAME_UPPER" else total - half
            p.low[i], p.high[i] = first, total - first
    function = _TRANSPOSED[rank]
    if p.low == p.high and min(p.low) >= 0:
        fits = all(m < max(s, d) for m, s, d in zip(more, p.strides, p.dilations, strict=True))
        if fits:
            return function(x, w, bias, p.strides, p.low, more, a.group, p.dilations)
    y = function(x, w, None, p.strides, 0, 0, a.group, p.dilations)
    cuts: list[int] = []
    for low, high, m in zip(p.low, p.high, more, strict=True):
        cuts = [-low, m - high, *cuts]
    y = F.pad(y, cuts)
    return y if bias is None else y + bias.reshape(-1, *[1] * rank)


@row("MaxPool", kinks="of ties the first")
def _max_pool(a: Any, x: T) -> tuple[T, T]:
    p, rank = _Window(a, x, a.kernel_shape), x.dim() - 2
    function = _MAX[rank]
    if p.even and all(2 * low <= k for low, k in zip(p.low, p.kernel, strict=True)):
        return function(x, p.kernel, p.strides, p.low, p.dilations, False, True)
    wide = F.pad(x, p.pads(), value=-math.inf)
    return function(wide, p.kernel, p.strides, 0, p.dilations, False, True)


def _summed(p: _Window, x: T) -> T:
    """The sum over each window: a convolution with ones."""
    n, channels = x.shape[:2]
    y = x.reshape(n * channels, 1, *x.shape[2:])
    y = _CONV[x.dim() - 2](y, x.new_ones(1, 1, *p.kernel), None, p.strides, 0, p.dilations)
    return y.reshape(n, channels, *y.shape[2:])


@row("AveragePool")
def _average_pool(a: Any, x: T) -> T:
    p, included = _Window(a, x, a.kernel_shape), bool(a.count_include_pad)
    narrow = all(2 * low <= k for low, k in zip(p.low, p.kernel, strict=True))
    if p.even and narrow and set(p.dilations) == {1}:
        return _AVERAGE[x.dim() - 2](x, p.kernel, p.strides, p.low, False, included)
    ones = torch.ones_like(x).detach()
    ones = F.pad(ones, p.pads(ceil=False), value=float(included))
    ceil = [n for more in reversed(p.ceil) for n in (0, more)]
    return _summed(p, F.pad(x, p.pads())) / _summed(p, F.pad(ones, ceil))


@row("LpPool")
def _lp_pool(a: Any, x: T) -> T:
    p = _Window(a, x, a.kernel_shape)
    return _summed(p, F.pad(x.abs() ** a.p, p.pads())) ** (1 / a.p)


@row("GlobalAveragePool")
def _global_average(a: Any, x: T) -> T:
    return x.mean(tuple(range(2, x.dim())), keepdim=True)


@row("GlobalMaxPool", kinks="ties share evenly")
def _global_max(a: Any, x: T) -> T:
    return x.amax(tuple(range(2, x.dim())), keepdim=True)


@row("GlobalLpPool")
def _global_lp(a: Any, x: T) -> T:
    return torch.linalg.vector_norm(x, a.p, tuple(range(2, x.dim())), keepdim=True)


@row("MaxUnpool")
def _max_unpool(a: Any, x: T, index: T, shape: T | None = None) -> T:
    if shape is not None:
        raise NoForm("numbers of another shape than that of the result")
    rank = x.dim() - 2
    size = [
        (n - 1) * s + k
        for n, s, k in zip(x.shape[2:], a.strides or [1] * rank, a.kernel_shape, strict=True)
    ]
    if any(a.pads or ()) or math.prod(x.shape[:2]) > 1:
        raise NoForm("pads, or numbers that run over all planes")
    return _UNPOOL[rank](x, index, a.kernel_shape, a.strides, [0] * rank, size)


@row("AffineGrid")
def _affine_grid(a: Any, theta: T, size: T) -> T:
    return F.affine_grid(theta, ints(size), align_corners=bool(a.align_corners))


@row("GridSample", kinks="of a nearest element: 0; of a linear share at an element: to its right")
def _grid_sample(a: Any, x: T, grid: T) -> T:
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(a.mode, str(a.mode))
    if x.dim() == 5 and mode == "bicubic":
        raise NoForm("cubic shares in three dims")
    return F.grid_sample(x, grid, mode, a.padding_mode, bool(a.align_corners))


_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


@row("Resize")
def _resize(
    a: Any, x: T, roi: T | None = None, scales: T | None = None, sizes: T | None = None
) -> T:
    """By interpolate, over the dims behind N and C, in the forms that it has."""
    axes = [d % x.dim() for d in a.axes or range(x.dim())]
    named: Any = scales if scales is not None and scales.numel() else sizes
    given = dict(zip(axes, named.tolist(), strict=True))
    dims = list(range(2, x.dim()))
    unit = 1.0 if named is scales else None
    if any(given.get(d, unit or x.shape[d]) != (unit or x.shape[d]) for d in (0, 1)):
        raise NoForm("batch or channels of another size")
    if a.keep_aspect_ratio_policy != "stretch":
        raise NoForm("one scale of several")
    how: dict[str, Any] = {}
    if named is scales:
        how["scale_factor"] = [float(given.get(d, 1.0)) for d in dims]
    else:
        how["size"] = [int(given.get(d, x.shape[d])) for d in dims]
    at, rank = a.coordinate_transformation_mode, len(dims)
    wide = bool(a.antialias)
    if bool(a.exclude_outside) != wide:
        raise NoForm("interpolate leaves elements outside out with antialias, and only then")
    if a.mode == "cubic" and a.cubic_coeff_a != (-0.5 if wide else -0.75):
        raise NoForm("other shares than interpolate's")
    if a.mode == "nearest":
        if at == "asymmetric" and a.nearest_mode == "floor":
            return F.interpolate(x, mode="nearest", **how)
        if at == "half_pixel" and a.nearest_mode == "round_prefer_ceil":
            return F.interpolate(x, mode="nearest-exact", **how)
        raise NoForm("other nearest elements than interpolate's")
    ones = min(how.get("size") or [2]) < 2
    aligned = at == "align_corners"
    if not aligned and at != "half_pixel" and not (at == "pytorch_half_pixel" and not ones):
        raise NoForm("other coordinates than interpolate's")
    if (a.mode == "cubic" or wide) and rank != 2:
        raise NoForm("cubic or wider shares of other than two dims")
    mode = "bicubic" if a.mode == "cubic" else _LINEAR[rank]
    return F.interpolate(x, mode=mode, align_corners=aligned, antialias=wide, **how)
