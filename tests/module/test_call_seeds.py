"""What an accelerated call draws by: torch's random state, which every other draw finds unmoved."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import onward
from onward.module import call_seeds

X = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
WORD = slice(24, 28)  # the bytes of `torch.get_rng_state()` that hold MT19937's first word


class Net(nn.Module):
    def __init__(self, p: float = 0.4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.drop, self.last = nn.Linear(8, 32), nn.Dropout(p), nn.Linear(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.tanh(self.first(x))))


def net(p: float = 0.4) -> Net:
    return onward.accelerate(Net(p).train())


def draws() -> list[torch.Tensor]:
    """By every way that torch draws on the CPU."""
    weight = torch.empty(3, 4)
    return [
        torch.rand(3), torch.randn(3), torch.randn(40), torch.randperm(9), torch.randint(9, (7,)),
        torch.empty(2, dtype=torch.float64).exponential_(), torch.bernoulli(torch.full((9,), 0.5)),
        nn.init.kaiming_uniform_(weight), torch.empty((), dtype=torch.int64).random_(),
        torch.multinomial(torch.ones(9), 4), torch.randn(5, dtype=torch.float64),
    ]  # fmt: skip


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, a, b))


# ---- others' draws


@pytest.mark.parametrize("backward", [False, True])
def test_others_draw_as_if_the_call_drew_nothing(backward: bool) -> None:
    """Over several blocks of the generator's words, and in states between its pairs."""
    model = net()
    model(X)
    found = []
    for called in (True, False):
        torch.manual_seed(5)
        drawn: list[torch.Tensor] = []
        for i in range(60):
            torch.rand(i)
            if called:
                loss = model(X).sum()
                if backward:
                    loss.backward()
            drawn += draws()
        found.append(drawn)
    assert same(*found)


def test_a_state_that_counts_draws_what_it_would_without() -> None:
    """At each place of a block, and beside eager's own generator over the next two blocks; what
    differs are bits of one word."""
    plain, counted = torch.Generator(), torch.Generator()
    for place in range(0, 1300, 3):
        for generator in (plain, counted):
            generator.manual_seed(place)
            torch.rand(place, generator=generator)
        for _ in range(1 + place % 5):
            call_seeds._count(counted)
        bytes_of = plain.get_state() != counted.get_state()
        assert bool(bytes_of.any())
        bytes_of[WORD] = False
        assert not bool(bytes_of.any())
        for kind in (torch.rand, torch.randn):
            assert torch.equal(kind(1400, generator=plain), kind(1400, generator=counted)), place


def test_calls_without_random_numbers_leave_the_state_as_it_is() -> None:
    for model, train in ((net(0.0), True), (net(), False)):
        model.train(train)
        before = torch.get_rng_state()
        for _ in range(2):
            model(X).sum().backward()
            with torch.no_grad():
                model(X)
        assert torch.equal(torch.get_rng_state(), before)


# ---- what decides a call's masks


def test_each_call_has_masks_of_its_own() -> None:
    """Also beyond the first word's turn to be made anew, of two models, and without gradients."""
    torch.manual_seed(5)
    model, other, found = net(), net(), []
    for i in range(12):
        found += [model(X), other(X)]
        with torch.no_grad():
            found.append(model(X))
        if i % 4 == 3:
            torch.rand(300)
    for i, y in enumerate(found):
        assert not any(torch.equal(y, z) for z in found[:i])


def test_a_state_comes_back_with_its_masks() -> None:
    model = net()
    torch.manual_seed(5)
    first, second = model(X), model(X)
    state = torch.get_rng_state()
    third, drawn, fourth = model(X), torch.rand(2), model(X)
    torch.set_rng_state(state)
    assert same([third, drawn, fourth], [model(X), torch.rand(2), model(X)])
    torch.manual_seed(5)
    assert same([first, second], [model(X), model(X)])
    torch.manual_seed(6)
    assert not torch.equal(first, model(X))
    torch.set_rng_state(state)
    with torch.random.fork_rng(devices=[]):
        assert torch.equal(third, model(X))
        model(X)
        torch.manual_seed(5)
        assert torch.equal(first, model(X))
    assert torch.equal(third, model(X))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_again(reentrant: bool) -> None:
    """Within a loop whose other draws go on between forward and backward."""
    model, x = net(), X.clone().requires_grad_()
    grads = []
    for through in (lambda x: model(x), lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        torch.manual_seed(5)
        model.zero_grad()
        x.grad = None
        y = through(x)
        drawn = torch.rand(3)
        y.square().sum().backward()
        after = torch.rand(3)
        grads.append([p.grad for p in model.parameters()] + [x.grad, y.detach(), drawn, after])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_a_call_that_runs_again_for_other_results_draws_the_same() -> None:
    class Two(Net):
        def forward(self, x: torch.Tensor) -> Any:
            h = self.drop(torch.tanh(self.first(x)))
            return {"y": self.last(h), "h": h}

    model = onward.accelerate(Two().train())
    for _ in range(3):
        model(X)["y"].sum().backward()
    out = model(X)
    state = torch.get_rng_state()
    y, h = out["y"], out["h"]
    torch.testing.assert_close(y, model.last(h), rtol=1e-5, atol=1e-6)
    assert torch.equal(torch.get_rng_state(), state)


# ---- another generator


@pytest.mark.parametrize("strange", ["it loses the count", "it raises", "the count decides"])
def test_where_the_state_cannot_count_the_call_draws(
    strange: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From torch's generator, which then moves, as eager's dropout moves it."""

    def count(generator: torch.Generator) -> bytes:
        state = generator.get_state()
        if strange == "it raises":
            raise RuntimeError("Invalid mt19937 state")
        if strange == "the count decides":
            torch.rand(1, generator=generator)
        return bytes(state[:8].tolist())

    model = net()
    with monkeypatch.context() as patch:
        patch.setattr(call_seeds, "_count", count)
        call_seeds._counts.cache_clear()
        try:
            torch.manual_seed(5)
            state = torch.get_rng_state()
            first, second = model(X), model(X)
            torch.set_rng_state(state)
            assert torch.equal(first, model(X))
            assert not torch.equal(first, second)
        finally:
            call_seeds._counts.cache_clear()
    assert call_seeds._counts()


# ---- Python's and numpy's


DRAWN: dict[str, Callable[[], float]] = {
    "Python's": random.random, "numpy's": lambda: float(np.random.rand()),
}  # fmt: skip


class Drawing(Net):
    def __init__(self, kind: str) -> None:
        super().__init__(0.0)
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * DRAWN[self.kind]()


@pytest.mark.parametrize("kind", DRAWN)
def test_what_runs_in_eager_draws_what_eager_draws(kind: str) -> None:
    """From the first call on, before which the forward was tried out."""
    eager = Drawing(kind).train()
    ours = onward.accelerate(copy.deepcopy(eager))
    found = []
    with pytest.warns(onward.EagerWarning, match="draws random numbers from"):
        for model in (ours, eager):
            random.seed(3)
            np.random.seed(3)
            found.append([model(X), model(X), torch.tensor([random.random(), np.random.rand()])])
    assert same(*found)


@pytest.mark.parametrize("kind", DRAWN)
def test_an_explanation_draws_nothing(kind: str) -> None:
    model = Drawing(kind).train()
    before = random.getstate(), repr(np.random.get_state(legacy=False))
    assert "draws random numbers from" in str(onward.explain(model, (X,)))
    assert (random.getstate(), repr(np.random.get_state(legacy=False))) == before
