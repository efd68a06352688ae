"""`torch.autograd.Function` in a forward: its own backward is run, as in eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from loops import OPTIMIZERS, Pair
from tiny_families import assert_same
from torch import nn
from torch.autograd.function import once_differentiable

from onward.capture import CaptureRequest, capture
from onward.errors import CaptureError

# mypy and pyright know no signatures of these functions
Function: Any = torch.autograd.Function


class Cubed(Function):
    """A function that saves its input, with a backward that is not the derivative of its
    forward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return dy * x * 2.5


class Clipped(Function):
    """The identity forward; a backward that clamps, and so is not linear."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, most: float) -> torch.Tensor:
        ctx.most = most
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None]:
        return dy.clamp(-ctx.most, ctx.most), None


class Reversed(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy.neg() * 0.5


class Rounded(Function):
    """Rounding with a straight-through gradient."""

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(inputs[0], output)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        x, y = ctx.saved_tensors
        return dy * ((x - y).abs() < 0.4)


class Two(Function):
    """A function of two tensors with four results: one holds integers, and one is read by
    nobody."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        best = a.argmax(-1)
        ctx.mark_non_differentiable(best)
        ctx.save_for_backward(a, w)
        return a @ w, best, a.sin(), a.cos()

    @staticmethod
    def backward(ctx: Any, dy: Any, _: Any, ds: Any, dc: Any) -> tuple[Any, ...]:
        a, w = ctx.saved_tensors
        da = dw = None
        if ctx.needs_input_grad[0]:
            da = dy @ w.t() * 0.5 + ds * 2 + dc
        if ctx.needs_input_grad[1]:
            dw = a.t() @ dy * 3
        return da, dw


class Picked(Function):
    """A function with an integer input, and a result that has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, places: torch.Tensor, name: str) -> Any:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return x.gather(1, places), places + 1

    @staticmethod
    def backward(ctx: Any, dy: Any, nothing: Any) -> tuple[Any, ...]:
        assert nothing is None
        (places,) = ctx.saved_tensors
        return dy.new_zeros(ctx.shape).scatter_add(1, places, dy * 1.5), None, None


class Twice(Function):
    """A function that returns one tensor twice: its input, or a new one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, new: bool) -> tuple[torch.Tensor, ...]:
        y = x * 2 if new else x
        return y, y

    @staticmethod
    def backward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, None]:
        return a * 2 + b * 5, None


class Alike(Function):
    """A function with two results that are computed alike."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sin(), x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        return a * 2 + b * 5 - c


class Within(Function):
    """A function whose backward calls another autograd function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return Cubed.apply(dy)


bound = Cubed.apply
Body = Callable[[Any, torch.Tensor], torch.Tensor]


def picked(net: Any, h: torch.Tensor) -> torch.Tensor:
    found, after = Picked.apply(h, (h > 0).long(), "name")
    return found * after


def without_gradients(net: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = Cubed.apply(h)
    return h * y


BODIES: dict[str, Body] = {
    "saved input": lambda net, h: Cubed.apply(h),
    "bound long ago": lambda net, h: bound(h) * h,
    "not linear": lambda net, h: Clipped.apply(h, 0.05) * h,
    "twice on the same": lambda net, h: Clipped.apply(h, 0.05) * 2 + Clipped.apply(h, 0.05) * h,
    "its result read twice": lambda net, h: (lambda y: y * 2 + y.sin())(Clipped.apply(h, 0.05)),
    "reversed": lambda net, h: Reversed.apply(h) + h.sin(),
    "straight through": lambda net, h: Rounded.apply(h),
    "one after the other": lambda net, h: Rounded.apply(Cubed.apply(Clipped.apply(h, 0.3))),
    "of a parameter": lambda net, h: (lambda y, best, s, _: y + best[:, None] + s.mean())(
        *Two.apply(h, net.v)
    ),
    "one result read": lambda net, h: Two.apply(h, net.v)[2],
    "whole numbers": picked,
    "its input twice": lambda net, h: (lambda a, b: a + b.sin())(*Twice.apply(h, False)),
    "a result twice": lambda net, h: (lambda a, b: a + b.sin())(*Twice.apply(h, True)),
    "results alike": lambda net, h: (lambda a, b, c: a + b.exp() * c)(*Alike.apply(h)),
    "a function in its backward": lambda net, h: Within.apply(h),
    "no_grad": without_gradients,
    "a loss of nothing else": lambda net, h: Cubed.apply(h.sum()).reshape(1, 1),
}


class Net(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.v = nn.Parameter(torch.randn(6, 6) / 2), nn.Parameter(torch.randn(6, 6) / 2)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.body(self, x @ self.w)
        return (y * (torch.arange(y.shape[-1]) + 1)).mean()


@pytest.mark.parametrize("name", BODIES)
def test_gradients_are_those_of_the_backward(name: str) -> None:
    model, x = Net(BODIES[name]), torch.randn(5, 6)
    assert_same([tiny.gradients(model, {"x": x})], model, [{"x": x}])


@pytest.mark.parametrize("name", BODIES)
def test_training_is_eagers(name: str) -> None:
    pair = Pair(Net(BODIES[name]), OPTIMIZERS["sgd"])
    for size in (5, 3, 5):
        pair.step(torch.randn(size, 6))


class Dirty(Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy * 2


class Asking(Cubed):
    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            return torch.autograd.grad((x**3).sum(), x)[0] * dy


class Short(Cubed):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * scale


class Narrow(Cubed):
    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy.sum(0)


REFUSED: dict[str, tuple[Body, str]] = {
    "writes": (lambda net, h: Dirty.apply(h), "Dirty writes in place into its inputs; fix"),
    "autograd inside": (lambda net, h: Asking.apply(h), r"calls torch\.autograd\.grad; .*fix"),
    "too few": (lambda net, h: Short.apply(h, 2.0), "Short returns 1 gradients for 2 inputs; fix"),
    "another shape": (lambda net, h: Narrow.apply(h), r"Narrow returns a gradient \[6\].*; fix"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_backwards_are_refused(name: str) -> None:
    body, said = REFUSED[name]
    with pytest.raises(CaptureError, match=said):
        capture(CaptureRequest(Net(body), (), {"x": torch.randn(5, 6)}))
