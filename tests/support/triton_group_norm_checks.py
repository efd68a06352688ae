"""GroupNorm and its gradient by Triton's interpreter beside PyTorch in fp64: tails, groups and
channels that several programs share, results that lie where an operand did."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from unittest.mock import patch

import torch
from kernel_calls import rubbish

from onward.graph.types import DType, Type
from onward.kernels import TRITON, KernelArguments, KernelSpec, torch_dtype
from onward.kernels.triton import group_norm

CHECKS: dict[str, Callable[[], None]] = {}
_TYPES = {torch_dtype(d): d for d in (DType.FLOAT, DType.FLOAT16)}
_EPSILON = 1e-5
_AROUND = 64  # numbers around each scratch that nothing may write


def _type(x: torch.Tensor) -> Type:
    return Type(_TYPES[x.dtype], tuple(x.shape))


def _launch(op: str, groups: int, inputs: list[torch.Tensor | None], y: list[torch.Tensor]) -> None:
    (kernel,) = TRITON[op]
    attrs = {"groups": groups, "epsilon": _EPSILON}
    types = tuple(None if x is None else _type(x) for x in inputs)
    spec = KernelSpec(op, attrs, types, tuple(_type(x) for x in y))
    assert kernel.unsupported(spec) is None, kernel.unsupported(spec)
    rooms, scratch = [], []
    for t in kernel.scratch(spec):
        inner = rubbish(t)
        rooms.append(torch.ones(inner.numel() + 2 * _AROUND))
        rooms[-1][_AROUND:-_AROUND] = inner.flatten()
        scratch.append(rooms[-1][_AROUND:-_AROUND].view(inner.shape))
    kernel.bind(KernelArguments(attrs, [*inputs], y, scratch))()
    for room in rooms:
        assert (room[:_AROUND] == 1).all() and (room[-_AROUND:] == 1).all(), "out of the scratch"


def _near(name: str, have: torch.Tensor, truth: torch.Tensor) -> None:
    unit = 1e-5 if have.dtype == torch.float32 else 2e-3
    level = max(1.0, float(truth.abs().mean())) if truth.numel() else 1.0
    torch.testing.assert_close(
        have.double(), truth.detach(), rtol=unit, atol=unit * level, msg=lambda m: f"{name}: {m}"
    )


def _run(
    shape: tuple[int, ...],
    groups: int,
    dtype: torch.dtype,
    weights: torch.dtype | None,
    widest: int = 8192,
    tile: int = 4096,
    over: int | None = None,
    far: float = 0.0,
) -> None:
    """Runs both ops on x of this shape. weights: the type of scale and bias, None for absent ones;
    widest, tile: sizes of a program; over: the operand that y and dx overwrite; far: the mean of
    x."""
    made = torch.Generator().manual_seed(1)
    x, dy = ((torch.randn(shape, generator=made) + t).to(dtype) for t in (far, 0.0))
    scale, bias = (None if weights is None else torch.randn(shape[1], generator=made).to(weights)
                   for _ in range(2))  # fmt: skip
    leaves = [
        x.double(),
        torch.ones(shape[1]).double() if scale is None else scale.double(),
        torch.zeros(shape[1]).double() if bias is None else bias.double(),
    ]
    for leaf in leaves:
        leaf.requires_grad_()
    with torch.enable_grad():
        want = torch.nn.functional.group_norm(leaves[0], groups, leaves[1], leaves[2], _EPSILON)
        grads = torch.autograd.grad(want, leaves, dy.double())
    rows = x.double().view(shape[0], groups, -1)
    y = x.clone() if over is not None else torch.full_like(x, torch.nan)
    mean, invstd = (torch.full((shape[0], groups), torch.nan) for _ in range(2))
    with patch.multiple(group_norm, _WIDEST=widest, _TILE=tile):
        _launch("GroupNorm", groups, [y if over is not None else x, scale, bias], [y, mean, invstd])
        _near("y", y, want)
        _near("mean", mean, rows.mean(2))
        _near("invstd", invstd, 1.0 / (rows.var(2, correction=0) + _EPSILON).sqrt())
        given = [dy.clone(), x.clone()]
        dx = torch.full_like(x, torch.nan) if over is None else given[over]
        dscale, dbias = (torch.full((shape[1],), torch.nan, dtype=dtype) for _ in range(2))
        _launch("GroupNormGrad", groups, [*given, scale, mean, invstd], [dx, dscale, dbias])
    size = math.sqrt(x.numel() / shape[1])
    _near("dx", dx, grads[0])
    _near("dscale", dscale / size, grads[1] / size)
    _near("dbias", dbias / size, grads[2] / size)


_FORMS: dict[str, partial[None]] = {
    "plain": partial(_run, (3, 6, 5, 7), 2),
    "long": partial(_run, (2, 4, 1300), 2),
    "one position": partial(_run, (9, 12), 3),
    "of each channel": partial(_run, (2, 5, 37), 5),
    "many channels": partial(_run, (2, 300, 3), 1),
    "channels in parts": partial(_run, (1, 2, 4500), 1),
    "in parts": partial(_run, (2, 6, 50), 3, widest=64, tile=16),
    "in many parts": partial(_run, (1, 4, 300), 1, widest=64, tile=16),
    "in parts of odd channels": partial(_run, (2, 6, 7, 11), 2, widest=64, tile=32),
    "over dy": partial(_run, (2, 6, 50), 3, over=0),
    "over x": partial(_run, (2, 6, 50), 3, widest=64, tile=16, over=1),
    "far": partial(_run, (2, 6, 50), 3, far=30.0),
    "far in parts": partial(_run, (2, 6, 50), 3, widest=64, tile=16, far=30.0),
}
for _name, _form in _FORMS.items():
    for _low, _dtype in (("float", torch.float32), ("float16", torch.float16)):
        if "far" in _name and _dtype == torch.float16:
            continue  # x itself is rounded to 1/64
        for _kind, _weights in (("", _dtype), (" bare", None), (" wide", torch.float32)):
            CHECKS[f"GroupNorm GroupNormGrad {_name}{_kind} {_low}"] = partial(
                _form, _dtype, _weights
            )


def _nothing() -> None:
    """A batch without samples has no gradient of the scale."""
    x, dscale, dbias = torch.ones(0, 4, 3), torch.ones(4), torch.ones(4)
    mean, invstd = torch.ones(0, 2), torch.ones(0, 2)
    _launch("GroupNorm", 2, [x, dscale, dbias], [x.clone(), mean, invstd])
    _launch("GroupNormGrad", 2, [x, x, dbias.clone(), mean, invstd], [x.clone(), dscale, dbias])
    assert not dscale.any() and not dbias.any()


CHECKS["GroupNorm GroupNormGrad without samples"] = _nothing
