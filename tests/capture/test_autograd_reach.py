"""A captured model gives a gradient, if only of zeros, to the same parameters as eager PyTorch."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import reaches
import torch
from reaches import COMPLEX, DRAWN, NO_TRANSLATION, REAL, Net
from torch import nn

import onward
from onward.capture import CapturedModule, CaptureRequest, capture
from onward.errors import CaptureError, EagerWarning
from onward.graph.names import user_name

WAYS = {f"{kind}: {name}": way
        for kind, table in (("complex", COMPLEX), ("real", REAL), ("drawn", DRAWN))
        for name, way in table.items()
        if kind != "complex" or name not in NO_TRANSLATION}  # fmt: skip
HELD = [name for name in COMPLEX if name not in NO_TRANSLATION]


def batch(seed: int = 1) -> torch.Tensor:
    return torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(seed))


def with_gradients(model: nn.Module) -> set[str]:
    return {n for n, p in model.named_parameters() if p.grad is not None}


def by_eager(model: nn.Module, *args: torch.Tensor) -> set[str]:
    twin = copy.deepcopy(model)
    twin(*args).backward()
    return with_gradients(twin)


def named(found: Any) -> set[str]:
    return {user_name(n) for n in found}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", WAYS)
def test_a_capture_reaches_what_autograd_does(name: str) -> None:
    model = Net(WAYS[name])
    want = by_eager(model, batch())
    assert named(capture(CaptureRequest(model, (batch(),), {})).reached) == want
    whole: CapturedModule = capture(
        CaptureRequest(model, (batch(),), {}, want_loss=False, whole=True)
    )
    assert [named(found) & dict(model.named_parameters()).keys()
            for found in whole.reaches.values()] == [want]  # fmt: skip


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def trained(model: nn.Module, call: Any, steps: int = 3) -> list[set[str]]:
    """The names of the parameters with a gradient, for each step."""
    optimizer, found = adamw(model), []
    for seed in range(steps):
        optimizer.zero_grad()
        call(batch(seed)).backward()
        found.append(with_gradients(model))
        optimizer.step()
    return found


def assert_alike(model: nn.Module, twin: nn.Module) -> None:
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", ["Trainer", "accelerate", "compile"])
@pytest.mark.parametrize("name", HELD)
def test_through_complex_numbers_what_moves_in_eager_moves(name: str, kind: str) -> None:
    model = Net(COMPLEX[name])
    twin = copy.deepcopy(model)
    want = trained(twin, twin)
    if kind == "Trainer":
        trainer = onward.Trainer(model, adamw(model))
        for seed in range(3):
            trainer.train_step(batch(seed))
    else:
        torch._dynamo.reset()
        call = torch.compile(model, backend="onward") if kind == "compile" else model
        if kind == "accelerate":
            onward.accelerate(model)
        # torch.compile turns constants into graph inputs
        eager = kind == "compile" and name == "by a constant"
        with pytest.warns(EagerWarning) if eager else nullcontext():
            assert trained(model, call) == want
    assert_alike(model, twin)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", NO_TRANSLATION)
def test_what_has_no_translation_is_refused_or_runs_in_eager(name: str) -> None:
    model = Net(COMPLEX[name])
    twin = copy.deepcopy(model)
    with pytest.raises(CaptureError):
        onward.Trainer(model, adamw(model)).train_step(batch())
    accelerated = onward.accelerate(model)
    with pytest.warns(EagerWarning, match="runs in eager PyTorch"):
        assert trained(model, accelerated, 2) == trained(twin, twin, 2)
    assert_alike(model, twin)


PAST_AUTOGRAD: dict[str, reaches.Way] = {
    "a value read": lambda x, w, v: (x @ w).data * x * v,
    "a parameter read": lambda x, w, v: x @ w.data * v,
    "a part of a complex number read": lambda x, w, v: reaches.shown(
        torch.polar((x @ w).abs() + 0.5, (x * v).data)
    ),
    "a value written": lambda x, w, v: (lambda y: (y.data.mul_(2.0), y * v)[1])(x @ w),
}


@pytest.mark.parametrize("name", PAST_AUTOGRAD)
def test_what_goes_past_autograd_is_refused_with_a_way_on(name: str) -> None:
    model = Net(PAST_AUTOGRAD[name])
    twin = copy.deepcopy(model)
    said = r"through \.data, .*fix: \.detach\(\) to read it; copy_ under"
    with pytest.raises(CaptureError, match=said) as refused:
        onward.Trainer(model, adamw(model)).train_step(batch())
    assert len(str(refused.value)) <= 300
    with pytest.warns(EagerWarning, match=said):
        assert trained(model, onward.accelerate(model), 2) == trained(twin, twin, 2)
    assert_alike(model, twin)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, z: torch.Tensor) -> torch.Tensor:
        return z * 2

    @staticmethod
    def backward(ctx: Any, *dz: torch.Tensor) -> torch.Tensor:
        return dz[0] * 3


class Holding(nn.Module):
    """A model with a complex tensor as a parameter or a buffer, as `where` says."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.w, self.where = nn.Parameter(torch.ones(8)), where
        z = torch.polar(torch.ones(4), torch.arange(4.0))
        if where == "parameter":
            self.z = nn.Parameter(z)
        else:
            self.register_buffer("z", z)

    def forward(self, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
        y = reaches.pairs(x * self.w)
        if self.where == "function":
            made = Doubled.apply(y)
            assert isinstance(made, torch.Tensor)
            return reaches.shown(made).square().mean()
        return reaches.shown(y * (self.z if z is None else z)).square().mean()


REFUSED = {
    "parameter": r"z is of torch.complex64.*; fix: .*view_as_real.*view_as_complex",
    "buffer": r"is of torch.complex64.*; fix: .*view_as_real.*view_as_complex",
    "batch": r"z is of torch.complex64.*; fix: .*view_as_real.*view_as_complex",
    "function": r"for complex tensors; fix: compute with x.real and x.imag",
}


@pytest.mark.parametrize("where", REFUSED)
def test_complex_tensors_that_a_graph_cannot_hold_are_refused(where: str) -> None:
    model = Holding(where)
    if where == "function":
        del model.z
    given = (torch.polar(torch.ones(4), torch.arange(4.0)),) if where == "batch" else ()
    with pytest.raises(CaptureError, match=REFUSED[where]):
        onward.Trainer(model, adamw(model)).train_step(batch(), *given)
    want = by_eager(model, batch(), *given)
    with pytest.warns(EagerWarning, match=REFUSED[where]):
        onward.accelerate(model)(batch(), *given).backward()
    assert with_gradients(model) == want
