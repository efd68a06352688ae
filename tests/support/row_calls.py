"""Calls of norms, gated units, rotary embeddings and sums beyond the sample calls of their ops:
tails, odd widths, operands of several types, strides, no rows, large coordinates."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from onward.graph.types import DType
from onward.kernels import torch_dtype

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")


@dataclass
class RowCall:
    """One call: its tensors, the outputs' memory too. programs: at most, that share sums."""

    op: str
    attrs: dict[str, Any]
    inputs: list[torch.Tensor | None]
    outputs: list[torch.Tensor]
    programs: int = 512


Calls = Iterator[tuple[str, Callable[[], RowCall]]]


def _drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, size: float = 1.0) -> Any:
    g = torch.Generator().manual_seed(len(shape) + sum(shape))
    return (torch.randn(shape, generator=g) * size).to(dtype)


def _norm(
    op: str, shape: tuple[int, ...], low: DType, ratio: float | None = None,
    coordinates: bool = False, dr: bool = True, stream: DType = DType.FLOAT,
) -> RowCall:  # fmt: skip
    """A norm whose x and y, dy and dx are low, and its sum of the type `stream`."""
    of_x, of_r = torch_dtype(low), torch_dtype(stream)
    attrs: dict[str, Any] = {"epsilon": 1e-5}
    draw: list[torch.Tensor | None] = []
    if ratio is not None:
        attrs |= {"ratio": ratio, "site": 2**20 + 5, "sample_dim": 0 if len(shape) > 1 else -1}
        draw = [torch.tensor([2**32 - 1, 2**31 + 12345]), torch.tensor(2**33 + 7)]
        if coordinates:
            places = torch.arange(2 * next(iter(shape)))
            draw.append(places.reshape(-1, 2) * (2**31 + 11) % 2**34)
    scale = _drawn(shape[-1:], of_r) + 1
    if not op.startswith("Add"):
        x = _drawn(shape, of_r)
        if op == "RMSNorm":
            return RowCall(op, attrs, [x, scale], [torch.empty_like(x)])
        outputs = [torch.empty_like(x), torch.empty_like(scale)]
        return RowCall(op, attrs, [_drawn((*shape, 1), of_r)[..., 0], x, scale], outputs)
    first, r = _drawn((*shape, 1), of_x)[..., 0], _drawn(shape, of_r)
    if op == "AddRMSNorm":
        attrs |= {"y_type": int(low)} if low != stream else {}
        outputs = [torch.empty_like(first), torch.empty_like(r)]
        return RowCall(op, attrs, [first, r, scale, *draw], outputs)
    attrs |= {"x_type": int(low)} if low != stream else {}
    outputs = [torch.empty_like(r), torch.empty_like(scale)]
    if ratio is not None or low != stream:
        outputs.append(torch.empty_like(first))
    second = _drawn((*shape, 1, 1), of_r)[..., 0, 0] if dr else None
    return RowCall(op, attrs, [first, second, r, scale, *draw], outputs)


def _norms(low: DType) -> Calls:
    for op in ("RMSNorm", "RMSNormGrad", "AddRMSNorm", "AddRMSNormGrad"):
        # a gradient of one number a row is what cancellation leaves
        narrow = (37, 2) if op.endswith("Grad") else (37, 1)
        for shape in (narrow, (7, 5), (3, 61, 70), (150, 1000), (2, 8192), (9,), (0, 24),
                      (2, 0, 24), (2, 3, 2, 2, 20)):  # fmt: skip
            yield f"{op} {shape}", lambda op=op, shape=shape: _norm(op, shape, low)
        yield (
            f"{op} several blocks",
            lambda op=op: replace(_norm(op, (3, 61, 70), low), programs=4),
        )
        yield (
            f"{op} one type",
            lambda op=op: _norm(op, (5, 70), low, 0.25 if "Add" in op else None, stream=low),
        )
    for op in ("AddRMSNorm", "AddRMSNormGrad"):
        for shape in ((5, 70), (2, 3, 2, 2, 20), (90, 64), (9,), (0, 24)):
            yield f"{op} drops {shape}", lambda op=op, shape=shape: _norm(op, shape, low, 0.3)
            if len(shape) > 1:
                yield (
                    f"{op} coordinates {shape}",
                    lambda op=op, shape=shape: _norm(op, shape, low, 0.3, coordinates=True),
                )
        yield f"{op} keeps all", lambda op=op: _norm(op, (5, 70), low, 0.0)
    yield "AddRMSNormGrad no dr", lambda: _norm("AddRMSNormGrad", (90, 64), low, 0.3, dr=False)


# ---- strides


def _halves(x: torch.Tensor) -> torch.Tensor:
    """x in the second half of rows of twice its width."""
    room = torch.ones((*x.shape[:-1], 2 * x.shape[-1]), dtype=x.dtype)
    y = room[..., x.shape[-1] :]
    y.copy_(x)
    return y


def _heads(x: torch.Tensor) -> torch.Tensor:
    """x[B,H,T,K] in the middle third of memory [B,T,3*H*K], as a product of q, k, v leaves it."""
    B, H, T, K = x.shape
    room = torch.ones((B, T, 3 * H * K), dtype=x.dtype)
    y = room[..., H * K : 2 * H * K].view(B, T, H, K).transpose(1, 2)
    y.copy_(x)
    return y


def _reversed(x: torch.Tensor) -> torch.Tensor:
    """x with its dims in the opposite order in memory, and gaps."""
    order = list(reversed(range(x.dim())))
    y = torch.ones([*(x.shape[d] for d in order), 2], dtype=x.dtype)[..., 1].permute(order)
    y.copy_(x)
    return y


def _as_it_is(x: torch.Tensor) -> torch.Tensor:
    return x


Lay = Callable[[torch.Tensor], torch.Tensor]
_LAYS: dict[str, Lay] = {"dense": _as_it_is, "halves": _halves, "reversed": _reversed}


def _gated(
    op: str, name: str, shape: tuple[int, ...], dtype: torch.dtype, lay: Lay, size: float = 1.0
) -> RowCall:
    tensors = [_drawn((*shape, *[1] * i), dtype, size).reshape(shape) for i in range(3)]
    inputs = [lay(x) for x in tensors[: 3 if op.endswith("Grad") else 2]]
    ends = lay if lay is not _reversed else _as_it_is
    outputs = [ends(torch.zeros(shape, dtype=dtype)) for _ in range(len(inputs) - 1)]
    return RowCall(op, {"activation": name}, [*inputs], outputs)


_GATES = ((3, 1500), (5, 17), (2, 3, 48), (3, 2, 5, 33), (3,), (), (0, 8))


def _gates(low: DType) -> Calls:
    dtype = torch_dtype(low)
    for op in ("GatedActivation", "GatedActivationGrad"):
        for name in ACTIVATIONS:
            for lay in _LAYS:
                for shape in _GATES if name == "silu" else _GATES[:2]:
                    if shape == () and lay == "halves":
                        continue
                    yield (
                        f"{op} {name} {lay} {shape}",
                        lambda op=op, name=name, shape=shape, lay=lay: _gated(
                            op, name, shape, dtype, _LAYS[lay]
                        ),
                    )
            yield (
                f"{op} {name} large",
                lambda op=op, name=name: _gated(op, name, (5, 170), dtype, _as_it_is, 30.0),
            )
        yield f"{op} heads", lambda op=op: _gated(op, "silu", (2, 3, 5, 16), dtype, _heads)


def _sums(low: DType) -> Calls:
    """Sums of terms of two types, of up to four each."""
    dtype = torch_dtype(low)

    def made(shape: tuple[int, ...], lows: int, wides: int) -> RowCall:
        terms = [_drawn((*shape, *[1] * i)).reshape(shape) for i in range(lows + wides)]
        inputs = [x.to(dtype) if i < lows else x for i, x in enumerate(terms)]
        return RowCall("WideSum", {}, [*inputs], [torch.empty(shape)])

    for lows, wides in ((1, 1), (2, 0), (3, 1), (4, 0), (1, 4), (4, 4), (0, 2), (0, 5)):
        for shape in ((3, 683), (5, 17), (2, 3, 2048), (), (0, 8)):
            yield (
                f"WideSum {lows} and {wides} {shape}",
                lambda shape=shape, lows=lows, wides=wides: made(shape, lows, wides),
            )


def _turned(
    shape: tuple[int, ...], angles: tuple[int, ...], low: DType, lay: Lay, ends: Lay,
    interleaved: bool, transposed: bool, of_angles: DType = DType.FLOAT,
) -> RowCall:  # fmt: skip
    x = lay(_drawn(shape, torch_dtype(low)))
    turns = _drawn(angles) * math.pi
    cos, sin = (f(turns).to(torch_dtype(of_angles)) for f in (torch.cos, torch.sin))
    attrs = {"interleaved": int(interleaved), "transposed": int(transposed)}
    y = ends(torch.zeros(shape, dtype=x.dtype))
    return RowCall("Rotary", attrs, [x, cos, _LAYS["reversed"](sin)], [y])


def _turns(low: DType) -> Calls:
    for interleaved in (False, True):
        for transposed in (False, True):
            kind = (interleaved, transposed)
            said = f"{'pairs' if interleaved else 'halves'}{' back' if transposed else ''}"
            for shape, angles in (
                ((2, 3, 5, 16), (1, 1, 5, 16)), ((2, 3, 50, 64), (2, 1, 50, 32)),
                ((2, 2, 3, 34), (2, 2, 3, 34)), ((1, 3, 5, 10), (1, 1, 5, 2)),
                ((2, 3, 5, 22), (1, 1, 1, 12)), ((0, 3, 5, 8), (1, 1, 5, 8)),
            ):  # fmt: skip
                for lay, ends in ((_heads, _heads), (_reversed, _as_it_is)):
                    yield (
                        f"Rotary {said} {lay.__name__} {shape} {angles}",
                        lambda a=(shape, angles, low, lay, ends, *kind): _turned(*a),
                    )
            for shape, angles in (
                ((8,), (6,)), ((70, 32), (70, 32)), ((3, 5, 6), (1, 5, 4)), ((3, 1040), (3, 2)),
            ):  # fmt: skip
                yield (
                    f"Rotary {said} one type {shape}",
                    lambda a=(shape, angles, low, _as_it_is, _as_it_is, *kind, low): _turned(*a),
                )


def calls(low: DType) -> Calls:
    """Names, and what makes each call."""
    yield from _norms(low)
    yield from _gates(low)
    yield from _turns(low)
    yield from _sums(low)
