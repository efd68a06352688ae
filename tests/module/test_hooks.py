"""Hooks on an accelerated module itself: called around its graph, as eager PyTorch calls them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from models import Positional, W
from torch import nn
from twins import Twins

import onward
from onward.errors import CaptureError, EagerWarning


def x(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, W, generator=torch.Generator().manual_seed(seed))


def doubles(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (2 * args[0], *args[1:])


def one_value(module: nn.Module, args: tuple[Any, ...]) -> torch.Tensor:
    return 3 * args[0]


def with_keywords(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "scale": 0.5}


def squares(module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
    return output * output


def adds_input(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor
) -> torch.Tensor:
    return output + args[0] + kwargs["scale"]


HOOKS: dict[str, list[tuple[str, Any, dict[str, Any]]]] = {
    "before": [("register_forward_pre_hook", doubles, {})],
    "before, one value": [("register_forward_pre_hook", one_value, {})],
    "before, with keywords": [("register_forward_pre_hook", with_keywords, {"with_kwargs": True})],
    "after": [("register_forward_hook", squares, {})],
    "in their order": [
        ("register_forward_hook", squares, {}),
        ("register_forward_hook", adds_input, {"with_kwargs": True, "prepend": True}),
        ("register_forward_pre_hook", one_value, {}),
        ("register_forward_pre_hook", doubles, {"prepend": True}),
        ("register_forward_pre_hook", with_keywords, {"with_kwargs": True}),
    ],
}


@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)
def test_what_hooks_give_counts(hooks: list[Any], captures: list[int]) -> None:
    twins = Twins(Positional(), strict=True)
    twins.step(lambda m: m(x(), scale=1.5))
    handles = [getattr(m, name)(hook, **named) for m in twins.both for name, hook, named in hooks]
    for i in range(2):
        twins.zero()
        twins.step(lambda m, i=i: m(x(i), scale=1.5))
    for handle in handles:
        handle.remove()
    twins.zero()
    twins.step(lambda m: m(x(), scale=1.5))
    assert twins.ran()


def test_hooks_see_each_call_once(captures: list[int]) -> None:
    seen: list[Any] = []
    model = onward.accelerate(Positional(), strict=True)
    model.register_forward_pre_hook(lambda m, args: seen.append(("before", m, args[0].clone())))
    model.register_forward_hook(lambda m, args, out: seen.append(("after", m, out)))
    found = [model(x(i)) for i in range(3)]
    assert [name for name, _, _ in seen] == ["before", "after"] * 3
    assert all(m is model for _, m, _ in seen)
    assert all(out is got for (_, _, out), got in zip(seen[1::2], found, strict=True))
    assert len(captures) == 1


def test_hooks_are_called_once_where_the_call_runs_in_eager() -> None:
    seen: list[int] = []
    model = onward.accelerate(Positional())
    model.register_forward_pre_hook(lambda *_: seen.append(1))
    model.register_forward_hook(lambda *_: seen.append(2))
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t)
    with hooks, pytest.warns(EagerWarning, match="saved_tensors_hooks"):
        model(x())
    assert seen == [1, 2]
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1
    with onward.eager():
        model(x())
    assert seen == [1, 2, 1, 2]


def test_hooks_that_are_always_called() -> None:
    for model in Twins(Positional(), strict=True).both:
        seen: list[Any] = []
        model.register_forward_hook(lambda m, a, out, s=seen: s.append(out), always_call=True)
        model.register_forward_hook(lambda m, a, out, s=seen: s.append("not called"))
        with warnings.catch_warnings(), pytest.raises((CaptureError, RuntimeError)):
            model(x()[:, :-1])
        assert seen == [None]


def test_hooks_beside_those_that_are_traced_run_in_eager_and_say_why() -> None:
    """The order of hooks decides what each computes, so a hook beside traced ones sends the call to
    eager."""
    twins = Twins(nn.utils.spectral_norm(nn.Linear(W, W)).eval())
    twins.step(lambda m: m(x()))
    assert twins.ran()
    for model in twins.both:
        model.register_forward_hook(squares)
    with pytest.warns(EagerWarning, match="Linear has the forward hook squares"):
        twins.step(lambda m: m(x()))


def test_a_module_s_hooks_within_another_are_refused() -> None:
    inner = onward.accelerate(Positional())
    inner.register_forward_hook(squares)
    outer = onward.accelerate(nn.Sequential(inner), strict=True)
    with pytest.raises(CaptureError, match="0 has the forward hook squares"):
        outer(x())
