"""Gradients of an accelerated model through autograd, in loops of many kinds, against eager."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Positional, Returns, W
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import CLOSE, Twins, moved_away, total

import onward
from onward.errors import OnwardError
from onward.module import accelerated


def x(seed: int = 0, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, W, generator=torch.Generator().manual_seed(seed))


def blocks(model: nn.Module) -> list[int]:
    """Bytes of the blocks that are lent; all models share the memory."""
    held = accelerated(model)
    assert held is not None
    assert held._memory is not None
    gc.collect()
    held._memory.blocks._sweep()
    return [block.nbytes for block in held._memory.blocks._lent]


# ---- forwards and backwards in other orders than one after the other

ORDERS = {"in turn": [0, 1, 2], "backwards": [2, 1, 0], "mixed": [1, 2, 0]}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("rows", [(3, 3, 3), (3, 4, 2)], ids=["one size", "sizes"])
def test_several_forwards_before_their_backwards(order: str, rows: tuple[int, ...]) -> None:
    twins = Twins(Positional())
    for _ in range(2):
        for model in twins.both:
            losses = [total(model(x(i, n), x(7, n))) for i, n in enumerate(rows)]
            for i in ORDERS[order]:
                losses[i].backward()
        twins.same_gradients()
        twins.zero()


def test_one_backward_of_several_forwards() -> None:
    twins = Twins(Positional())
    for model in twins.both:
        total([model(x(i)) for i in range(4)]).backward()
    twins.same_gradients()


def test_a_forward_of_another_s_output() -> None:
    twins = Twins(Positional())
    for model in twins.both:
        total(model(torch.relu(model(model(x()))), model(x(1)))).backward()
    twins.same_gradients()


def test_forwards_without_a_backward_keep_no_memory() -> None:
    """Dropped outputs, errors in between and calls without gradients leave no memory behind."""
    twins = Twins(Positional())
    total(twins.ours(x())).backward()
    before = blocks(twins.ours)
    for i in range(100):
        found = twins.ours(x(i))
        if i % 3 == 0:
            with torch.no_grad():
                twins.ours(x(i))
        if i % 5 == 0:
            with pytest.raises(RuntimeError):
                total(found + torch.ones(2, 2, 2, 1)).backward(torch.ones(3))
        del found
    assert blocks(twins.ours) == before


# ---- accumulation, and who holds gradients


def test_a_model_that_is_gone_is_gone_with_its_parameters() -> None:
    """A deleted model is freed with its parameters, also while its last block waits to be lent
    again."""
    model = onward.accelerate(Positional())
    held = accelerated(model)
    assert held is not None
    model(x()).sum().backward()
    parameter, memory = weakref.ref(model.a.weight), held._memory  # which other models may keep
    assert memory is not None
    del model, held
    gc.collect()
    assert parameter() is None
    assert memory.blocks.nbytes


@pytest.mark.parametrize("none", [True, False], ids=["to none", "to zero"])
def test_accumulated_over_steps(none: bool) -> None:
    twins = Twins(Positional())
    for step in range(6):
        for model in twins.both:
            total(model(x(step))).backward()
        twins.same_gradients()
        if step % 3 == 2:
            twins.zero(set_to_none=none)


def test_accumulation_of_1_and_5_is_6() -> None:
    """A gradient that was handed out is not overwritten by the next: 1 and 5 accumulate to 6."""
    model: Any = onward.accelerate(nn.Linear(2, 1, bias=False))
    ones = torch.ones(1, 2)
    model(ones).backward(torch.tensor([[1.0]]))
    held = model.weight.grad
    model(ones).backward(torch.tensor([[5.0]]))
    assert model.weight.grad is held
    assert held.tolist() == [[6.0, 6.0]]
    kept = held
    model.zero_grad()
    model(ones).backward(torch.tensor([[3.0]]))
    assert kept.tolist() == [[6.0, 6.0]]
    assert model.weight.grad.tolist() == [[3.0, 3.0]]


class Sum(nn.Module):
    """A model with two parameters of equal gradients, and a strided buffer that each forward
    writes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(W)), nn.Parameter(torch.zeros(W))
        self.register_buffer("seen", torch.zeros(W, 2)[:, 0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen: Any = self.seen
        seen.add_(x.detach().mean(0))
        return torch.sin(x + self.a + self.b)


def test_equal_gradients_are_two_tensors() -> None:
    twins = Twins(Sum())
    for step in range(3):
        for model in twins.both:
            total(model(x(step))).backward()
            model.a.grad.mul_(2)
            model.b.grad += 1
        twins.same_gradients()


def test_a_buffer_with_gaps_is_written() -> None:
    twins = Twins(Sum())
    for step in range(3):
        twins.step(lambda m, s=step: m(x(s)))
        twins.same_buffers()
        assert twins.ours.seen.stride() == (2,)
    assert twins.ours.seen.any() and twins.ran()


def test_a_loop_reuses_one_block() -> None:
    model = onward.accelerate(Positional())
    seen: set[int] = set()
    for step in range(6):
        model.zero_grad()
        total(model(x(step))).backward()
        seen |= {p.grad.data_ptr() for p in model.parameters() if p.grad is not None}
    assert len(seen) <= 2 * 4, "gradients move about"


def test_gradients_read_scaled_clipped_and_replaced() -> None:
    twins = Twins(Positional())
    for step in range(4):
        for model in twins.both:
            total(model(x(step))).backward()
            for p in model.parameters():
                p.grad.mul_(0.5)
            model.a.bias.grad = model.a.bias.grad * 3
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            assert norm > 0.1
            with torch.no_grad():
                for p in model.parameters():
                    p -= 0.1 * p.grad
        twins.same_gradients()
        if step % 2:
            twins.zero()
    for p, q in zip(twins.ours.parameters(), twins.eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, **CLOSE)


def test_gradients_by_autograd_grad() -> None:
    twins = Twins(Positional())
    found = [torch.autograd.grad(total(m(x())), list(m.parameters())) for m in twins.both]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
    some = [torch.autograd.grad(total(m(x())), [m.b.weight]) for m in twins.both]
    torch.testing.assert_close(some[0][0], some[1][0], **CLOSE)
    assert all(p.grad is None for p in twins.ours.parameters())


# ---- retain_graph, gradients of gradients


def test_retained_graphs() -> None:
    twins = Twins(Returns("tuple"))
    for model in twins.both:
        h, z = model(x())
        h.sum().backward(retain_graph=True)
        z.sum().backward(retain_graph=True)
        (h * z).sum().backward()
    twins.same_gradients()


def test_a_retained_graph_in_a_block_that_is_larger_than_it_needs() -> None:
    """The block that forward took was free and large; the copy for a retained graph gets a smaller
    one."""
    twins = Twins(Positional())
    for _ in range(2):
        for model in twins.both:
            wide = total(model(x(rows=40)))
            del wide
            loss = total(model(x()))
            loss.backward(retain_graph=True)
            loss.backward()
        twins.same_gradients()


@pytest.mark.parametrize("which", ["ours", "eager"])
def test_a_second_backward_without_retain_graph_raises_as_torch_does(which: str) -> None:
    model = getattr(Twins(Positional()), which)
    loss = total(model(x()))
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_gradients_of_gradients_are_refused() -> None:
    model = onward.accelerate(Positional())
    loss = total(model(x()))
    grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    eager = torch.autograd.grad(total(model(x())), list(model.parameters()))
    for a, b in zip(grads, eager, strict=True):
        torch.testing.assert_close(a.detach(), b)
    with pytest.raises(OnwardError, match=r"second derivatives .* `with onward.eager"):
        torch.stack([g.pow(2).sum() for g in grads]).sum().backward()
    with onward.eager():
        twice = torch.autograd.grad(total(model(x())), list(model.parameters()), create_graph=True)
        torch.stack([g.pow(2).sum() for g in twice]).sum().backward()


def test_gradients_of_gradients_by_an_input_are_refused() -> None:
    """A gradient penalty needs second derivatives, which are refused."""
    model = onward.accelerate(Positional())
    given = x().requires_grad_()
    (g,) = torch.autograd.grad(model(given).sum(), given, create_graph=True)
    with pytest.raises(OnwardError, match="second derivatives"):
        (g.norm() - 1).pow(2).backward()


# ---- inputs that require gradients


@pytest.mark.parametrize("which", ["x", "y", "both", "frozen"])
def test_inputs_that_require_gradients(which: str) -> None:
    twins = Twins(Positional())
    for step in range(2):
        found = []
        for model in twins.both:
            if which == "frozen":
                model.requires_grad_(False)
            a, b = x(step), x(step + 5)
            if which in ("x", "both", "frozen"):
                a.requires_grad_()
            if which in ("y", "both"):
                b.requires_grad_()
            total(model(a * 2 if step else a, b)).backward()
            found.append((a.grad, b.grad))
        for p, q in zip(*found, strict=True):
            assert (p is None) == (q is None)
            if p is not None:
                torch.testing.assert_close(p, q, **CLOSE)
        twins.same_gradients()


def test_the_same_input_twice() -> None:
    twins = Twins(Positional())
    found = []
    for model in twins.both:
        a = x().requires_grad_()
        total(model(a, a)).backward()
        found.append(a.grad)
    torch.testing.assert_close(*found, **CLOSE)


# ---- which parameters are trained


def test_requires_grad_toggled_between_steps() -> None:
    """A combination of requires_grad flags that was met before is not captured again."""
    twins = Twins(Positional())
    for step in range(8):
        twins.zero()
        for model in twins.both:
            model.a.requires_grad_(bool(step % 2))
            model.b.bias.requires_grad_(bool(step % 3))
        twins.step(lambda m, s=step: m(x(s)))
    held = accelerated(twins.ours)
    assert held is not None
    assert len(list(held._states)) == 4


def test_all_frozen() -> None:
    twins = Twins(Positional().requires_grad_(False))
    assert not twins.same(lambda m: m(x())).requires_grad


class Unused(Positional):
    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Linear(2, 2)
        self.cut = nn.Linear(W, W)
        self.times_zero = nn.Parameter(torch.ones(W))

    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x) + self.cut(x).detach() + 0 * self.times_zero


def test_unused_parameters_have_no_gradient() -> None:
    twins = Twins(Unused())
    twins.step(lambda m: m(x()))
    assert twins.ours.never.weight.grad is twins.ours.cut.weight.grad is None
    assert not twins.ours.times_zero.grad.any()


def test_an_output_that_is_not_differentiated_gives_no_gradient() -> None:
    """A parameter that only an unused output reads gets no gradient, not even zeros."""
    twins = Twins(Returns("tuple"))
    for which in (0, 1, 0, 0, 1):
        twins.zero()
        for model in twins.both:
            model(x())[which].sum().backward()
        twins.same_gradients()


# ---- hooks that autograd calls


def test_hooks_on_parameters_and_tensors() -> None:
    twins = Twins(Positional())
    seen: list[list[float]] = [[], []]
    for model, told in zip(twins.both, seen, strict=True):
        model.a.weight.register_hook(lambda g: g * 2)
        model.b.weight.register_post_accumulate_grad_hook(
            lambda p, t=told: t.append(float(p.grad.norm()))
        )
        for step in range(3):
            given = x(step).requires_grad_()
            given.register_hook(lambda g, t=told: t.append(float(g.norm())))
            found = model(given)
            found.register_hook(lambda g, t=told: t.append(float(g.norm())))
            found.retain_grad()
            total(found).backward()
            told.append(float(found.grad.norm()))
    assert seen[0] == pytest.approx(seen[1], rel=1e-4)
    assert len(seen[0]) == 12
    twins.same_gradients()


# ---- checkpoints


class Dropping(Positional):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return nn.functional.dropout(super().forward(x), 0.5, self.training)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [Positional, Dropping])
def test_checkpoint_around(kind: type, reentrant: bool) -> None:
    """The forward that backward runs again draws the masks of the first time."""
    model = onward.accelerate(kind())
    plain: list[torch.Tensor] = []
    for seed in range(3):
        found = []
        for checkpointed in (False, True):
            model.zero_grad()
            torch.manual_seed(seed)
            given = x(seed).requires_grad_()
            y = checkpoint(model, given, use_reentrant=reentrant) if checkpointed else model(given)
            z = model(y)
            total(z).backward()
            found.append([y, z, given.grad, *(p.grad.clone() for p in model.parameters())])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)
        plain.append(found[0][0])


class Inside(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.first, self.second = Positional(), Positional()
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        h = self.first(x)
        return checkpoint(self.second, h, use_reentrant=self.reentrant)


def test_checkpoint_inside() -> None:
    Twins(Inside(False)).step(lambda m: m(x()))


def test_a_checkpoint_spares_the_block() -> None:
    model = onward.accelerate(Positional())
    total(model(x())).backward()
    before = blocks(model)
    found = [checkpoint(model, x(i).requires_grad_(), use_reentrant=False) for i in range(8)]
    assert len(blocks(model)) <= len(before)
    model.zero_grad()
    total(found).backward()
    eager = Twins(Positional()).eager
    total([eager(x(i)) for i in range(8)]).backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **CLOSE)


def test_a_checkpoint_whose_second_forward_is_planned_otherwise() -> None:
    """Between the two forwards the call has learned which output is differentiated, and keeps fewer
    residuals."""
    twins = Twins(Returns("tuple"))
    for model in twins.both:
        outs = [checkpoint(model, x(i, 3 + i), use_reentrant=False) for i in range(3)]
        for i, out in enumerate(outs):
            out[0].sin().sum().backward(retain_graph=bool(i == 1))
        outs[1][0].sum().backward()
    twins.same_gradients()


def test_saved_tensors_that_were_moved() -> None:
    """Saved tensors may be moved while the block is lent to another forward."""
    twins = Twins(Positional())
    with moved_away():
        losses = [total(m(x())) for m in twins.both]
    others = [total(m(x(5))) for m in twins.both]
    for loss in (*losses, *others):
        loss.backward()
    twins.same_gradients()


# ---- a parameter that changes in between

CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda p: p.mul_(2),
    "its data": lambda p: setattr(p, "data", p.data * 2),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_parameter_changed_between_forward_and_backward(kind: str) -> None:
    model = onward.accelerate(Positional())
    loss = total(model(x()))
    with torch.no_grad():
        CHANGES[kind](model.b.weight)
    with pytest.raises(OnwardError, match=r"'b.weight' was modified in place between"):
        loss.backward()
    total(model(x())).backward()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU, "tanh": lambda: nn.GELU(approximate="tanh"), "silu": nn.SiLU, "relu": nn.ReLU,
}  # fmt: skip
BIASES = {
    "in place": CHANGES["in place"], "within its data": lambda p: p.data.mul_(-2),
    "a longer way": lambda p: p.detach().add_(1.0),
}  # fmt: skip


SPELLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda b: b.view(2, 8).flatten()[:8], "a slice": lambda b: b[3:11],
    "a chunk": lambda b: b.chunk(2)[1], "every other": lambda b: b[::2],
    "computed": lambda b: b[:8] * 2, "a row": lambda b: b.view(2, 8)[1],
}  # fmt: skip


class Biased(nn.Module):
    def __init__(self, kind: str, spelled: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.act, self.last = nn.Linear(W, 8), ACTIVATIONS[kind](), nn.Linear(8, W)
        self.bias, self.shown = nn.Parameter(torch.randn(16)), SPELLED.get(spelled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.shown(self.bias) if self.shown else self.first.bias
        h = self.act(nn.functional.linear(x, self.first.weight, bias))
        return self.last(h + nn.functional.relu(self.first(x)))


@pytest.mark.parametrize("change", BIASES)
@pytest.mark.parametrize("spelled", ["its own", *SPELLED])
@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_a_bias_changed_between_forward_and_backward(kind: str, spelled: str, change: str) -> None:
    """A bias may change before backward: eager mode saves the sum with it, not the bias."""
    twins = Twins(Biased(kind, spelled))
    for model in twins.both:
        loss = total(model(x()))
        with torch.no_grad():
            BIASES[change](model.bias if spelled in SPELLED else model.first.bias)
        loss.backward()
    twins.same_gradients()


def test_an_activation_of_a_parameter_that_changes() -> None:
    """A parameter may change before backward: the product's operand is the saved one, the slope the
    changed parameter's."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(x(1, W))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ nn.functional.gelu(self.w)

    twins = Twins(Gate())
    for model in twins.both:
        given = x().requires_grad_()
        y = model(given)
        model.w.data.mul_(-2)
        y.sum().backward()
    twins.same_gradients()


# ---- optimizers

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, 0.01, fused=True),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, 0.01, foreach=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.05),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.001),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.001),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], 0.01),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers(kind: str) -> None:
    if kind == "Muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has it from 2.9 on")
    twins = Twins(Positional())
    optimizers = [OPTIMIZERS[kind](list(m.parameters())) for m in twins.both]
    for step in range(4):
        for model, optimizer in zip(twins.both, optimizers, strict=True):
            optimizer.zero_grad()
            total(model(x(step))).backward()
            optimizer.step()
    for p, q in zip(twins.ours.parameters(), twins.eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-3, atol=2e-5)


def test_lbfgs() -> None:
    """L-BFGS runs many forwards and backwards in one step."""
    twins = Twins(Positional())
    for model in twins.both:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)

        def closure(m: Any = model, o: Any = optimizer) -> torch.Tensor:
            o.zero_grad()
            loss = m(x()).pow(2).mean()
            loss.backward()
            return loss

        optimizer.step(closure)
    for p, q in zip(twins.ours.parameters(), twins.eager.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5)


def test_averaged_copies() -> None:
    """torch's averaged copies (EMA) keep a plain model."""
    model = onward.accelerate(Positional())
    average = torch.optim.swa_utils.AveragedModel(model)
    total(model(x())).backward()
    average.update_parameters(model)
    assert accelerated(average.module) is None
    assert copy.deepcopy(model)(x()).shape == (3, W)
