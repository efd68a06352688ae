"""Sizes of convolutions and pools as polynomials: PyTorch's, at every number put in."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.types import Dim, Type, floor_divide, parse_type, symbol

B, T = symbol("B"), symbol("T")


def number(size: Any, **dims: int) -> int:
    return size.number(dims) if isinstance(size, Dim) else size


QUOTIENTS = tuple(itertools.product((0, 2, 6), range(-7, 8), (2, 3)))


@pytest.mark.parametrize(("times", "plus", "by"), QUOTIENTS)
def test_floor_divide_rounds_down_or_gives_up(times: int, plus: int, by: int) -> None:
    found = floor_divide(B * T * times + plus, by)
    if times % by:
        assert found is None
    else:
        assert found is not None
        for b, t in itertools.product((1, 2, 5), (1, 3)):
            assert number(found, B=b, T=t) == (times * b * t + plus) // by


def made(op: str, x: Type, *weights: str, **attrs: Any) -> Type:
    graph = Graph()
    inputs: list[Value] = [graph.input("x", x, Role.BATCH)]
    inputs += [graph.input(f"w{i}", parse_type(w), Role.PARAM) for i, w in enumerate(weights)]
    found = Builder(graph).node(op, inputs, attrs)
    return type_of(found[0] if isinstance(found, tuple) else found)


LINE = parse_type("f32[B,3,T]")
WINDOWS = tuple(itertools.product((1, 2, 3, 4), (1, 2, 3), (0, 1), (1, 2)))


@pytest.mark.parametrize(("kernel", "stride", "pad", "dilation"), WINDOWS)
def test_sizes_are_torchs(kernel: int, stride: int, pad: int, dilation: int) -> None:
    window = {"strides": [stride], "pads": [pad, pad], "dilations": [dilation]}
    weight = torch.zeros(5, 3, kernel)
    for times, plus in ((1, 0), (2, 0), (2, 1), (3, 2), (6, 5)):
        x = LINE.with_shape((B, 3, T * times + plus))
        if times % stride:
            with pytest.raises(ValueError, match="no polynomial"):
                made("Conv", x, f"f32[5,3,{kernel}]", **window)
            continue
        y = made("Conv", x, f"f32[5,3,{kernel}]", **window)
        back = made("ConvTranspose", y, f"f32[5,3,{kernel}]", **window)
        for t in (7, 8):
            image = torch.zeros(2, 3, t * times + plus)
            want = torch.convolution(
                image, weight, None, [stride], [pad], [dilation], False, [0], 1
            )
            assert [number(n, B=2, T=t) for n in y.shape] == list(want.shape)
            more = torch.convolution(want, weight, None, [stride], [pad], [dilation], True, [0], 1)
            assert [number(n, B=2, T=t) for n in back.shape] == list(more.shape)


WRONG: dict[str, tuple[str, str, tuple[str, ...], dict[str, Any], str]] = {
    "too large": ("Conv", "f32[2,3,4]", ("f32[5,3,5]",), {}, "larger"),
    "channels": ("Conv", "f32[2,3,4]", ("f32[5,2,2]",), {}, "channels"),
    "groups": ("Conv", "f32[2,4,4]", ("f32[5,2,2]",), {"group": 2}, "channels"),
    "a bias": ("Conv", "f32[2,3,4]", ("f32[5,3,2]", "f32[4]"), {}, "bias"),
    "ranks": ("Conv", "f32[2,3,4]", ("f32[5,3,2,2]",), {}, "1[+] more"),
    "steps of 0": ("Conv", "f32[2,3,4]", ("f32[5,3,2]",), {"strides": [0]}, "strides"),
    "two steps": ("Conv", "f32[2,3,4]", ("f32[5,3,2]",), {"strides": [1, 1]}, "strides"),
    "automatic": ("Conv", "f32[2,3,4]", ("f32[5,3,2]",), {"auto_pad": "VALID"}, "auto_pad"),
    "element types": ("Conv", "f32[2,3,4]", ("f64[5,3,2]",), {}, "element types"),
    "back, channels": ("ConvTranspose", "f32[2,3,4]", ("f32[5,3,2]",), {}, "channels"),
    "back, nothing": ("ConvTranspose", "f32[2,3,1]", ("f32[3,3,2]",), {"pads": [1, 1]}, "nothing"),
    "only padding": (
        "MaxPool", "f32[2,3,4]", (), {"kernel_shape": [2], "pads": [2, 0]}, "its padding"
    ),
    "rounded up": ("MaxPool", "f32[2,3,4]", (), {"kernel_shape": [2], "ceil_mode": 1}, "ceil_mode"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused(name: str) -> None:
    op, x, weights, attrs, said = WRONG[name]
    with pytest.raises(ValueError, match=said):
        made(op, parse_type(x), *weights, **attrs)
