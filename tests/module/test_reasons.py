"""Why a call runs in eager PyTorch: for how long a reason holds, and that no loop captures anew at
each call."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
import torch
from models import Positional, Returns, W
from torch import nn
from twins import Twins, total

import onward
from onward.compile import Compiler
from onward.errors import CaptureError, EagerWarning
from onward.module import accelerated, states


def x(seed: int = 0, rows: int = 3, width: int = W) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


# ---- a batch that does not fit


def test_a_bad_batch_raises_what_eager_raises_and_says_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    twins = Twins(Positional())
    said = []
    with caplog.at_level(logging.WARNING):
        for model in twins.both:
            with pytest.raises(RuntimeError) as error:
                model(x(width=W + 1))
            said.append(str(error.value))
            assert error.value.__cause__ is error.value.__context__ is None
    assert said[0] == said[1]
    assert not [r for r in caplog.records if r.name.startswith("torch")]


@pytest.mark.parametrize("strict", [False, True])
def test_after_bad_batches_good_ones_run_as_a_graph(strict: bool) -> None:
    """Bad and good batches are of one kind, so that a failed one must give no reason against the
    others."""
    twins = Twins(Positional(), strict=strict)
    for width in (W + 1, W + 2, W + 3, W + 1):
        with pytest.raises((RuntimeError, CaptureError)):
            twins.ours(x(width=width))
    twins.step(lambda m: m(x()))
    assert twins.ran()


class OnlyWide(Positional):
    """A model that has no graph for batches of two or three rows."""

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        if x.shape[0] in (2, 3):
            x = x * float(x.sum() * 0 + 1)
        return super().forward(x)


def test_a_reason_holds_for_its_sizes(captures: list[int]) -> None:
    twins = Twins(OnlyWide())
    for rows in (2, 2, 3, 3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EagerWarning)
            twins.same(lambda m, r=rows: m(x(rows=r)))
    assert len(captures) == 2 and not twins.ran()
    twins.step(lambda m: m(x(rows=5)))
    assert twins.ran()


class Never(Positional):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x * float(x.sum() * 0 + 1))


def test_a_kind_that_has_no_graph_is_not_tried_at_every_size(captures: list[int]) -> None:
    twins = Twins(Never())
    with pytest.warns(EagerWarning) as told:
        for rows in range(2, 12):
            twins.same(lambda m, r=rows: m(x(rows=r)))
    assert len(captures) == 3
    assert len({str(w.message) for w in told}) == len(told)


# ---- what cannot be planned


class Dropping(Positional):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("grad", [True, False])
def test_what_cannot_be_planned_runs_in_eager(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that fails leaves the call to eager: nothing has run before, and no random number is
    drawn."""

    def refuses(*_: Any, **__: Any) -> None:
        raise CaptureError("no plan today")

    twins = Twins(Dropping())
    monkeypatch.setattr(Compiler, "plan", refuses)
    with pytest.warns(EagerWarning, match="no plan today"), torch.set_grad_enabled(grad):
        twins.same(lambda m: m(x()))
    state = torch.get_rng_state()
    twins.eager(x())
    after = torch.get_rng_state()
    torch.set_rng_state(state)
    twins.ours(x())  # said once: a warning would be an error here
    assert torch.equal(after, torch.get_rng_state())


# ---- loops that would capture at each call


def test_a_number_that_is_another_at_each_call(captures: list[int]) -> None:
    twins = Twins(Positional())
    with pytest.warns(
        EagerWarning, match=r"8 values \(0.0, .*, 7.0\).*fix: pass it as a tensor"
    ) as told:
        for i in range(20):
            twins.zero()
            twins.step(lambda m, i=i: m(x(), scale=float(i)))
    assert len(captures) == 8 and len(told) == 1
    twins.step(lambda m: m(x(), scale=3.0))
    twins.step(lambda m: m(x(), x(1), scale=3.0))
    assert len(captures) == 9, "other arguments are counted by themselves"


class Scaled(Positional):
    scale: Any = 1.0

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x) * self.scale


def test_an_attribute_that_is_another_at_each_call(captures: list[int]) -> None:
    """A graph runs again once the attribute comes to rest."""
    twins = Twins(Scaled())
    with pytest.warns(EagerWarning, match=r"model\.scale has changed 10 times.*fix:") as told:
        for i in range(20):
            for model in twins.both:
                model.scale = float(i)
            twins.zero()
            twins.step(lambda m: m(x()))
    assert len(captures) == 10 and len(told) == 1
    for seed in range(6):
        twins.zero()
        twins.step(lambda m, s=seed: m(x(s)))
    assert len(captures) == 11


class Counting(Positional):
    calls = 0

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        self.calls += 1
        return super().forward(x) * self.calls


def test_a_forward_that_counts_its_calls(captures: list[int]) -> None:
    twins = Twins(Counting())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for i in range(30):
            twins.zero()
            twins.same(lambda m: m(x()))
            assert twins.ours.calls == twins.eager.calls == i + 1
    assert len(captures) <= 12
    assert len({str(w.message) for w in told}) == len(told) <= 3


def test_sizes_that_share_no_graph(captures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "GRAPHS", 3)

    class Unrolled(Positional):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            for i in range(x.shape[0]):
                x = x * (1 + 0.1 * i)
            return super().forward(x)

    twins = Twins(Unrolled())
    with pytest.warns(EagerWarning, match="3 graphs of other input shapes .* none fits") as told:
        for rows in (2, 3, 4, 5, 6, 2, 3):
            twins.zero()
            twins.step(lambda m, r=rows: m(x(rows=r)))
    assert len(captures) == 3 and len(told) == 1


def _threefold(p: torch.Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(3)


def test_hooks_on_parameters_are_not_looked_at_anew_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hooks on parameters, which DDP sets on each, cost no walk over the model at each call."""
    from onward.prepare.guards import Guards

    looks: list[int] = []
    plain = Guards._look
    monkeypatch.setattr(Guards, "_look", lambda *a: (looks.append(1), plain(*a))[1])
    twins = Twins(Positional())
    twins.step(lambda m: m(x()))
    for model in twins.both:
        model.a.weight.register_hook(lambda g: g * 2)
        model.b.weight.register_post_accumulate_grad_hook(_threefold)
    twins.step(lambda m: m(x(1)))
    seen = len(looks)
    for seed in range(4):
        twins.step(lambda m, s=seed: m(x(s)))
    assert len(looks) == seen
    for model in twins.both:
        model.a.weight.register_hook(lambda g: g + 1)
    twins.step(lambda m: m(x(1)))


# ---- what is held and handed out


def test_outputs_are_let_go_with_their_last_name() -> None:
    """No reference cycle keeps an output, or the block of its forward, until a collection."""
    import gc

    model = onward.accelerate(Positional())
    total(model(x())).backward()
    model.zero_grad()
    held = accelerated(model)
    assert held is not None and held._memory is not None
    blocks = held._memory.blocks
    gc.collect()
    gc.disable()
    try:
        blocks._sweep()
        before = len(blocks._lent)
        for seed in range(3):
            model(x(seed))
        blocks._sweep()
        assert len(blocks._lent) == before
    finally:
        gc.enable()


def test_gradients_that_are_moved_into_shared_memory() -> None:
    """Gradients lie in a lent block; once their storage is moved, the block is not lent again."""
    twins = Twins(Positional())
    for step in range(5):
        twins.zero()
        twins.step(lambda m, s=step: m(x(s)))
        if step % 2:
            for model in twins.both:
                model.a.weight.grad.share_memory_()
    twins.same_gradients()


def test_a_backward_under_another_default_device() -> None:
    twins = Twins(Returns("tuple"))
    losses = [[m(x())[0].sum(), m(x(1))[1].sin().sum()] for m in twins.both]
    with torch.device("meta"):
        for first, second in losses:
            second.backward()
            first.backward()
    twins.same_gradients()
