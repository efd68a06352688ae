"""Accelerated models in programs: chains, losses over several outputs, models that change on the
way, exceptions in the middle; against eager PyTorch."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from models import Base, Keywords, Nested, Positional, Returns, W
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from twins import CLOSE, Twins, assert_same, total

import onward
from onward.errors import EagerWarning
from onward.module import accelerated


def x(seed: int = 0, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, W, generator=torch.Generator().manual_seed(seed))


# ---- one after the other, and into each other

PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "a chain through whole numbers": (
        lambda: Returns("whole numbers"), lambda m: m(m(x())["best"][:, None] * x(1))["h"],
    ),
    "a chain of three": (Positional, lambda m: m(m(m(x())))),
    "two outputs, one of which the other's loss leans on": (
        lambda: Returns("tuple"), lambda m: (o := m(x()))[0].sum() * o[1].detach().mean() + o[1],
    ),
    "an output written in place": (Positional, lambda m: m(x()).mul_(2).add_(x(1))),
    "an input of it written in place": (Positional, lambda m: m(x().requires_grad_() * 1).exp_()),
    "a forward between another and its backward": (Positional, lambda m: (m(x()), m(x(1, 4)))),
    "a list with values of no use": (Nested, lambda m: m([x(), "text", None, {"a": x(1)}])),
    "none after none": (
        Keywords, lambda m: m(x(), a=None, b=None, c=None, first=x(1), d=None, e=None),
    ),
    "a checkpoint around": (Positional, lambda m: checkpoint(m, x(), x(1), use_reentrant=False)),
    "a checkpoint around, with options": (
        Positional, lambda m: checkpoint(m, x(), use_reentrant=False, preserve_rng_state=False),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs(name: str) -> None:
    kind, act = PROGRAMS[name]
    twins = Twins(kind())
    for _ in range(3):
        twins.zero()
        twins.step(act)
    assert twins.ran()


class Stateless(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 2


def test_a_model_without_parameters() -> None:
    twins = Twins(Stateless())
    twins.same(lambda m: m(x()))
    grads = []
    for model in twins.both:
        given = x().requires_grad_()
        total(model(given)).backward()
        grads.append(given.grad)
    torch.testing.assert_close(*grads, **CLOSE)
    assert twins.ran()


class ByMode(Base):
    def forward(self, x: torch.Tensor) -> Any:
        h = self.a(nn.functional.dropout(x, 0.5, self.training))
        return {"loss": h.sum(), "n": 3} if self.training else (h, self.b(h), None)


def test_outputs_that_depend_on_the_mode() -> None:
    """Evaluation has no dropout: outputs are eager's, bit for bit."""
    twins = Twins(ByMode())
    for step in range(6):
        for model in twins.both:
            model.train(step % 2 == 0)
        if step % 2:
            twins.step(lambda m: m(x()))
        else:
            ours, eager = twins.each(lambda m: m(x()))
            assert type(ours) is type(eager) is dict and ours["n"] == eager["n"]
        twins.zero()


# ---- a model that changes on the way


def bert_step(model: Any, seed: int, length: int = 10) -> torch.Tensor:
    loss = model(**tiny.batch(3, length, "right", seed=seed)).loss
    loss.backward()
    return loss.detach()


def _resized(m: Any) -> None:
    torch.manual_seed(3)
    m.resize_token_embeddings(m.config.vocab_size + 7)


BERT_CHANGES: dict[str, Callable[[Any], Any]] = {
    "more tokens": _resized,
    "another attention": lambda m: m.set_attn_implementation("eager"),
    "frozen embeddings": lambda m: m.bert.embeddings.requires_grad_(False),
    "other activations": lambda m: setattr(
        m.bert.encoder.layer[0].intermediate, "intermediate_act_fn", nn.ReLU()
    ),
    "a layer less": lambda m: m.bert.encoder.layer.__delitem__(-1),
    "layers in another order": lambda m: m.bert.encoder.layer.insert(0, m.bert.encoder.layer[-1]),
    "checkpoints": lambda m: getattr(
        m, "activation_checkpointing_enable", m.gradient_checkpointing_enable
    )(),
    "gradients of inputs": lambda m: m.enable_input_require_grads(),
    "double": lambda m: m.double(),
    "evaluation": lambda m: m.eval(),
}
IN_EAGER = {"double": "float64, which Onward cannot train"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", BERT_CHANGES)
def test_a_transformer_that_changes_between_steps(name: str) -> None:
    twins = Twins(tiny.bert(0.0))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", EagerWarning)
        for step in range(4):
            if step == 2:
                for model in twins.both:
                    BERT_CHANGES[name](model)
            twins.zero()
            losses = twins.each(lambda m, s=step: bert_step(m, s))
            torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-6)
            twins.same_gradients()
    reasons = [str(w.message) for w in told]
    assert len(reasons) == (name in IN_EAGER), reasons
    assert IN_EAGER.get(name, "") in "".join(reasons)


def test_a_memory_budget(captures: list[int]) -> None:
    plain = Twins(tiny.bert(0.0))
    less = Twins(tiny.bert(0.0), memory_budget=0.7)
    for twins in (plain, less):
        twins.each(lambda m: bert_step(m, 0, 24))
        twins.same_gradients()
    whole, part = (accelerated(t.ours) for t in (plain, less))
    assert whole is not None and part is not None
    assert part.plan.peak < whole.plan.peak


def test_graphs_of_another_run_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, captures: list[int]
) -> None:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path))
    monkeypatch.setenv("ONWARD_GRAPH_CACHE", "1")
    for _ in range(2):
        twins = Twins(tiny.bert(0.0))
        for step in range(2):
            twins.zero()
            twins.each(lambda m, s=step: bert_step(m, s))
            twins.same_gradients()


# ---- exceptions in the middle


class Stop(BaseException):
    pass


@pytest.mark.parametrize("where", ["parameter", "output", "input"])
def test_an_interrupt_in_a_hook_leaves_all_usable(where: str) -> None:
    twins = Twins(Positional())
    twins.step(lambda m: m(x()))
    model = twins.ours

    def stop(_: Any) -> None:
        raise Stop

    given = x().requires_grad_()
    out = model(given)
    at = {"parameter": model.a.weight, "output": out, "input": given}[where]
    handle = at.register_hook(stop)
    with pytest.raises(Stop):
        total(out).backward()
    handle.remove()
    for _ in range(2):
        twins.zero()
        twins.step(lambda m: m(x(1)))
    held = accelerated(model)
    assert held is not None and held._memory is not None
    del out
    twins.zero()
    held._memory.blocks._sweep()
    assert all(block.is_held for block in held._memory.blocks._lent)


def test_an_exception_in_the_forward_leaves_all_usable() -> None:
    class Raises(Positional):
        def forward(self, x: torch.Tensor, bad: bool = False) -> Any:  # type: ignore[override]
            if bad:
                raise KeyError("here")
            return super().forward(x)

    twins = Twins(Raises())
    for step in range(3):
        for model in twins.both:
            with pytest.raises(KeyError, match="here"):
                model(x(), bad=True)
        twins.zero()
        twins.step(lambda m, s=step: m(x(s)))
    assert twins.ran()


# ---- threads


def test_two_models_in_two_threads_each() -> None:
    twins = [Twins(Positional()), Twins(Returns("tuple"))]
    want = [[t.eager(x(i)) for i in range(4)] for t in twins]
    # now: while a thread's first call captures a model, its attributes are stand-ins
    weights = [t.ours.a.weight for t in twins]
    errors: list[BaseException] = []

    def work(which: int) -> None:
        try:
            for turn in range(6):
                for i in range(4):
                    found = twins[which].ours(x(i))
                    assert_same(found, want[which][i])
                    if turn % 2:
                        with torch.no_grad():
                            twins[which].ours(x(i))
                    torch.autograd.grad(total(found), [weights[which]])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i % 2,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_loop_goes_on_from_a_saved_state() -> None:
    """Training goes on in a new model and optimizer that load the saved state, as in a new
    process."""
    twins = Twins(tiny.bert(0.0))
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3) for m in twins.both]
    for step in range(5):
        if step == 3:
            fresh = onward.accelerate(tiny.bert(0.0))
            fresh.load_state_dict(copy.deepcopy(twins.ours.state_dict()))
            again = torch.optim.AdamW(fresh.parameters(), 1e-3)
            again.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
            twins.ours, optimizers[0] = fresh, again
        losses = []
        for model, optimizer in zip(twins.both, optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(bert_step(model, step))
            optimizer.step()
        torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-5)


_STARTED, _CALLED = threading.Event(), threading.Event()


class Waiting(nn.Module):
    """A module that, while it is traced, waits until another thread calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if _get_current_dispatch_mode() is not None:
            _STARTED.set()
            assert _CALLED.wait(20)
            time.sleep(0.3)
        return self.inner(x)


def test_another_thread_calls_a_model_while_it_is_traced() -> None:
    """A call from another thread waits, since the parameters belong to the trace until it ends."""
    twins = Twins(Waiting())
    x, found = torch.randn(2, 4), list[Any]()

    def work() -> None:
        try:
            assert _STARTED.wait(20)
            _CALLED.set()
            found.append(twins.ours(x))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    twins.step(lambda m: m(x))
    thread.join()
    assert twins.ran()
    assert type(found[0]) is torch.Tensor
    torch.testing.assert_close(found[0], twins.eager(x), **CLOSE)
