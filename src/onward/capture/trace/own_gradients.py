"""Traces the backward of a `torch.autograd.Function` right after its forward.

The backward's nodes lie in the graph between `GradientOf`, which stands for the cotangent, and
`WithGradient` (graph/ops/own_gradient.py), where differentiation finds them.
"""

from __future__ import annotations

from typing import Any

import torch

from onward.capture.trace.gradient_edges import carries
from onward.errors import CaptureError

_UNDER_AUTOCAST = {torch.float32, torch.bfloat16, torch.float16}


@torch.library.custom_op("onward::gradient_of", mutates_args=())
def gradient_of(y: torch.Tensor, result: int) -> torch.Tensor:
    """Placeholder op: the cotangent of y, which is the function's result number `result`."""
    raise NotImplementedError("onward::gradient_of exists during capture only")


@gradient_of.register_fake
def _(y: Any, result: int) -> Any:
    return torch.empty_like(y)


@torch.library.custom_op("onward::with_gradient", mutates_args=())
def with_gradient(
    ys: list[torch.Tensor],
    gs: list[torch.Tensor],
    dxs: list[torch.Tensor],
    xs: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Placeholder op: returns ys; declares dxs as the gradients of xs, for cotangents gs of ys."""
    raise NotImplementedError("onward::with_gradient exists during capture only")


@with_gradient.register_fake
def _(ys: Any, gs: Any, dxs: Any, xs: Any) -> Any:
    return [torch.empty_like(y) for y in ys]


class FunctionContext:
    """The `ctx` of a function's forward and backward. All floating and complex inputs count as
    needing a gradient, since a trace does not know which do."""

    def __init__(self, name: str, args: tuple[Any, ...]) -> None:
        self._name = name
        self.needs_input_grad = tuple(carries(a) for a in args)
        self.saved_tensors: tuple[Any, ...] = ()
        self.materialize_grads, self.non_differentiable = True, ()

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *_: Any) -> None:
        """Does nothing: there is no forward-mode differentiation."""

    def mark_non_differentiable(self, *tensors: Any) -> None:
        self.non_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value

    def mark_dirty(self, *_: Any) -> None:
        raise CaptureError(
            f"the torch.autograd.Function {self._name} writes in place into its inputs; fix: "
            "return a new tensor"
        )


def applied(cls: Any, own_context: bool, args: tuple[Any, ...]) -> Any:
    """Returns what `cls.apply(*args)` does, with the backward traced. own_context: whether the
    class has a `setup_context`. Raises CaptureError for a backward with wrong numbers, shapes or
    dtypes of gradients, and for a forward that writes into its inputs."""
    name = cls.__qualname__
    ctx = FunctionContext(name, args)
    with torch.no_grad():
        given = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    results = cls.forward(*given) if own_context else cls.forward(ctx, *given)
    if own_context:
        cls.setup_context(ctx, tuple(given), results)
    found = list(results) if isinstance(results, tuple) else [results]
    fixed = [id(t) for t in ctx.non_differentiable]
    places = [i for i, t in enumerate(found) if carries(t) and id(t) not in fixed]
    # autograd makes each input a view of its own; a new tensor returned twice has one place
    inputs, last = [id(a) for a in given], {id(found[i]): i for i in places}
    place = {i: i if id(found[i]) in inputs else last[id(found[i])] for i in places}
    places = sorted({*place.values()})
    if not places or not any(ctx.needs_input_grad):
        return results
    gs: list[Any] = [None] * len(found)
    for i, t in enumerate(found):
        if i in places:
            gs[i] = torch.ops.onward.gradient_of(t, i)
        elif isinstance(t, torch.Tensor) and ctx.materialize_grads:
            gs[i] = torch.zeros_like(t)
    dxs = cls.backward(ctx, *gs)
    pairs = _pairs(name, args, dxs if isinstance(dxs, tuple) else (dxs,))
    if not pairs:
        return results
    ys = torch.ops.onward.with_gradient(
        [found[i] for i in places], [gs[i] for i in places],
        [dx for dx, _ in pairs], [x for _, x in pairs],
    )  # fmt: skip
    made = dict(zip(places, ys, strict=True))
    for i, at in place.items():
        found[i] = made[at]
    return tuple(found) if isinstance(results, tuple) else found[0]


def _pairs(name: str, args: tuple[Any, ...], dxs: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    """Returns (gradient, input) for the inputs that get one. Raises CaptureError."""
    if len(dxs) < len(args) or any(dx is not None for dx in dxs[len(args) :]):
        raise CaptureError(
            f"the backward of the torch.autograd.Function {name} returns {len(dxs)} gradients "
            f"for {len(args)} inputs; fix: return one (or None) for each input"
        )
    pairs = [
        (dx.to(x.dtype) if {dx.dtype, x.dtype} <= _UNDER_AUTOCAST else dx, x)  # as autograd does
        for dx, x in zip(dxs, args, strict=False)
        if dx is not None and carries(x)
    ]
    for dx, x in pairs:
        if dx.shape != x.shape or dx.dtype != x.dtype:
            raise CaptureError(
                f"the backward of the torch.autograd.Function {name} returns a gradient "
                f"{list(dx.shape)} of {dx.dtype} for an input {list(x.shape)} of {x.dtype}; "
                "fix: return one of the input's shape and dtype"
            )
    return pairs


__all__ = ["applied"]
