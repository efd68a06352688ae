"""What a part that runs in PyTorch does besides its results, and when its backward does not run."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from twins import Twins

import onward
from onward import EagerWarning

D = 8


@pytest.fixture(autouse=True)
def _expected() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*in eager PyTorch within the graph", EagerWarning)
        yield


def x(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, 5)), D, generator=torch.Generator().manual_seed(seed))


class Counting(nn.Module):
    """A part that leaves PyTorch, counts its calls and keeps statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.calls = nn.BatchNorm1d(D), nn.Linear(D, D), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.norm(self.linear(x).flatten(0, 1)).view_as(x)
        return y * (0.5 + float(x.detach().numpy().mean() > 100))


class Aside(nn.Module):
    """A model whose loss does not read what the part returns."""

    part: Any

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(D, D), part

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.first(x)
        return {"loss": h.pow(2).mean(), "aside": self.part(h).sin()}


@pytest.mark.parametrize("loop", ["trainer", "module", "loss alone"])
def test_a_part_that_the_loss_does_not_read_runs_in_every_call(loop: str) -> None:
    torch.manual_seed(0)
    ours = Aside(Counting()).train()
    eager = copy.deepcopy(ours)
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, eager)]
    trainer = onward.Trainer(ours, steps[0]) if loop == "trainer" else None
    if trainer is None:
        onward.accelerate(ours, outputs="loss" if loop == "loss alone" else "auto")
    for i in range(3):
        for m, optimizer in zip((ours, eager), steps, strict=True):
            if m is ours and trainer is not None:
                trainer.train_step(x=x(i))
                continue
            optimizer.zero_grad()
            m(x(i))["loss"].backward()
            optimizer.step()
        assert ours.part.calls == eager.part.calls == i + 1
        for (name, b), c in zip(ours.named_buffers(), eager.buffers(), strict=True):
            torch.testing.assert_close(b, c, msg=lambda text, n=name: f"{n} {text}")


def test_an_evaluation_runs_a_part_that_the_loss_does_not_read() -> None:
    torch.manual_seed(0)
    ours = Aside(Counting()).train()
    trainer = onward.Trainer(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    trainer.eval_step(x=x(0))
    trainer.eval_step(x=x(1), fetch=["aside"])
    assert ours.part.calls == 2
    assert int(ours.part.norm.num_batches_tracked) == 0


class Affine(torch.autograd.Function):
    """A function whose backward is not linear in dy: it gives a gradient even for zeros."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * float(x.detach().numpy().std())

    @staticmethod
    def backward(ctx: Any, *dys: Any) -> Any:
        return dys[0] + ctx.saved_tensors[0]


class Both(nn.Module):
    """A part that returns two tensors, one of them made by parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.one(x), self.other(Affine.apply(x))


class Apart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(D, D), Both()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        y, z = self.part(self.first(x))
        return {"loss": (y + z.detach()).pow(2).mean(), "aside": z.sin()}


@pytest.mark.parametrize("ends", ["loss", "aside", "both"])
@pytest.mark.parametrize("model", [lambda: Aside(_Affine()), Apart])
def test_what_no_cotangent_comes_for_has_no_backward(model: Any, ends: str) -> None:
    """A part without a cotangent has no backward: from zeros it need not give zeros, and a
    parameter that it reaches would get a gradient."""
    torch.manual_seed(0)
    twins = Twins(model())
    for i in range(3):
        twins.zero()
        for found in twins.each(lambda m, i=i: m(x(i))):
            chosen = [found[n].sum() for n in found if ends in (n, "both")]
            torch.stack(chosen).sum().backward()
        twins.same_gradients()


class _Affine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Affine.apply(self.linear(x))  # type: ignore[return-value]


class Either(Counting):
    def __init__(self) -> None:
        super().__init__()
        self.rare = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return self.rare(y) if float(x.detach().numpy().mean()) > 1 else y


class Loss(nn.Module):
    part: Any

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part = nn.Linear(D, D), part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(self.first(x).tanh() + x.mean()).pow(2).mean()


def test_a_step_that_is_refused_leaves_a_part_s_buffers_as_they_were() -> None:
    ours = Loss(Either()).train()
    trainer = onward.Trainer(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    for i in range(3):
        if i:  # it reads all that it holds
            trainer.train_step(x=x(i) + 3)
        before = copy.deepcopy(ours.state_dict())
        with pytest.raises(onward.OnwardError, match=r"part\.rare"):
            trainer.train_step(x=x(i) - 3)
        for name, t in ours.state_dict().items():
            assert torch.equal(t, before[name]), name
    assert int(ours.part.norm.num_batches_tracked) == 2


class Noting(nn.Module):
    """A part that leaves PyTorch, and counts its calls in a number, a list, a dict, an object and a
    class."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rare = nn.Linear(D, D), nn.Linear(D, D)
        self.seen: list[int] = []
        self.by, self.held = {"n": 0}, types.SimpleNamespace(n=0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.by["n"] += 1
        self.held.n += 1
        y = self.linear(x) * (1.0 + 0.5 * self.calls)
        return self.rare(y) if float(x.detach().numpy().mean()) < 1 else y

    def said(self) -> Any:
        return self.calls, list(self.seen), dict(self.by), self.held.n


class Looked(nn.Module):
    """A model with a part and an embedding, in which an id out of range is met only after the part
    has run."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.part = nn.Embedding(5, D), Noting()

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return (self.part(x) + self.table(ids)).pow(2).mean()


def _a_step_that_is_refused(trainer: onward.Trainer, batch: dict[str, Any]) -> None:
    with pytest.raises(onward.OnwardError, match=r"part\.rare"):
        trainer.train_step(batch | {"x": batch["x"] + 9})


def _an_id_out_of_range(trainer: onward.Trainer, batch: dict[str, Any]) -> None:
    with pytest.raises(IndexError):
        trainer.train_step(batch | {"ids": batch["ids"] + 9})


@pytest.mark.parametrize(
    "done",
    [
        _a_step_that_is_refused,
        _an_id_out_of_range,
        lambda trainer, batch: trainer.profile(),
        lambda trainer, batch: trainer.verify(batch),
        lambda trainer, batch: trainer.explain(batch),
    ],
    ids=["refused", "an id out of range", "profile", "verify", "explain"],
)
def test_what_is_no_step_leaves_what_a_part_sets_as_it_was(done: Any) -> None:
    torch.manual_seed(0)
    ours = Looked().train()
    eager = copy.deepcopy(ours)
    trainer = onward.Trainer(ours, torch.optim.SGD(ours.parameters(), lr=0.0))
    batch: dict[str, Any] = {"x": x(0).clamp(-1, 1), "ids": torch.arange(5).repeat(3, 1)}
    for _ in range(2):
        found = trainer.train_step(batch).loss
        torch.testing.assert_close(found, eager(**batch).detach())
        done(trainer, batch)
        assert ours.part.said() == eager.part.said()


@pytest.mark.parametrize("options", [
    {"skip_nonfinite": False}, {}, {"gradient_accumulation_steps": 2},
    {"gradient_accumulation_steps": 2, "skip_nonfinite": False},
])  # fmt: skip
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_parameter_that_a_part_leaves_out_is_met_before_any_update(
    place: str, options: dict[str, Any]
) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.part = nn.Linear(D, D), nn.Linear(D, D), Either()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.part(x) if place == "first" else x
            x = self.two(self.one(x).tanh()).tanh()
            return (self.part(x) if place == "last" else x).pow(2).mean()

    torch.manual_seed(0)
    ours = Net().train()
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, weight_decay=0.1)
    trainer = onward.Trainer(ours, optimizer, options=options)
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(onward.OnwardError, match=r"part\.rare"):
        trainer.train_step(x=x(0))
    for name, t in ours.state_dict().items():
        assert torch.equal(t, before[name]), name
    onward.Trainer(ours, optimizer, options=options)  # there is no window of the other's


def test_a_size_that_is_the_width_too() -> None:
    """Sizes may equal the width: result sizes are inferred from a second batch that varies one of
    the two, or none."""
    torch.manual_seed(0)
    twins = Twins(Loss(Counting()))
    for i, shape in enumerate([(2, D), (D, 2), (2, 3), (D, D), (3, D)]):
        twins.zero()
        twins.step(lambda m, i=i, s=shape: m(x(i, *s)))
    assert twins.ran()


@pytest.mark.parametrize("first", [(2, 4), (3, 5), (4, 4), (2, D)])
def test_a_trainer_s_first_batch_may_have_any_sizes(first: tuple[int, int]) -> None:
    """A Trainer would refuse a later batch whose part returned other sizes than were inferred, so
    the first batch must not mislead it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.part = nn.Embedding(13, D), Counting()

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.part(self.embed(ids)).sin().mean()

    torch.manual_seed(0)
    ours = Net()
    eager = copy.deepcopy(ours)
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, eager)]
    trainer = onward.Trainer(ours, steps[0])
    for shape in [first, (D, 2), (2, 3), (5, 7), (D, D)]:
        ids = torch.arange(shape[0] * shape[1]).view(shape) % 13
        found = trainer.train_step(ids=ids).loss
        steps[1].zero_grad()
        want = eager(ids)
        want.backward()
        steps[1].step()
        torch.testing.assert_close(found, want.detach(), rtol=1e-4, atol=1e-6)


def test_the_check_of_unread_rows_runs_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    class Net(nn.Module):
        part: Any

        def __init__(self) -> None:
            super().__init__()
            self.part, self.head = Counting(), nn.Linear(D, 5)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.part(x))
            return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    monkeypatch.setenv("ONWARD_CHECK", "1")
    torch.manual_seed(0)
    ours = Net().train()
    trainer = onward.Trainer(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    labels = torch.full((4, 9), -100)
    labels[:, 0] = 1
    for i in range(3):
        trainer.train_step(x=x(i, 4, 9), labels=labels)
        assert ours.part.calls == int(ours.part.norm.num_batches_tracked) == i + 1


def test_an_evaluation_s_parts_are_in_evaluation_mode() -> None:
    """Parts are in evaluation mode in an evaluation, whatever the model's mode is at the time."""
    torch.manual_seed(0)
    ours = Loss(Counting()).train()
    trainer = onward.Trainer(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    trainer.train_step(x=x(0))
    for i in range(3):
        eager = copy.deepcopy(ours).eval()
        found = trainer.eval_step(x=x(i)).loss
        torch.testing.assert_close(found, eager(x(i)).detach(), rtol=1e-5, atol=1e-6)
        assert ours.part.training and int(ours.part.norm.num_batches_tracked) == 1


class Special(nn.Module):
    """A part that calls an operator without a translation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.special.i1(x)


@pytest.mark.parametrize("first", [Counting, Special])
def test_a_part_and_an_operator_behind_one_another(first: type[nn.Module]) -> None:
    torch.manual_seed(0)
    second = Special if first is Counting else Counting
    twins = Twins(Loss(nn.Sequential(first(), second())))
    for i in range(3):
        twins.zero()
        twins.step(lambda m, i=i: m(x(i)))
    twins.same_buffers()


class Setting(nn.Module):
    """A part that sets a value of its own, which the next call reads."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear, self.inner, self.table = nn.Linear(D, D), inner, None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(D) * 0.1
        return self.inner(self.linear(x) + self.table).pow(2).mean()


def test_torchscript_in_a_model_whose_forward_is_rehearsed() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        part: Any = torch.jit.script(nn.Sequential(nn.Linear(D, D), nn.Tanh()))
    ours = Setting(part)
    before = copy.deepcopy(ours.state_dict())
    trainer = onward.Trainer(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    found = trainer.eval_step(x=x(0)).loss
    for name, t in ours.state_dict().items():
        assert torch.equal(t, before[name]), name
    torch.testing.assert_close(found, ours(x(0)).detach())


@pytest.mark.sample(2)
@pytest.mark.parametrize("activation", [nn.Tanh, nn.GELU, nn.SiLU])
@pytest.mark.parametrize("budget", [0.3, None])
@pytest.mark.parametrize("loop", ["trainer", "module"])
def test_within_less_memory_a_part_runs_once_and_reads_what_it_read(
    loop: str, budget: float | None, activation: type[nn.Module]
) -> None:
    """A part runs once under a memory budget: recomputed values lie elsewhere than those its own
    backward reads."""
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(D, D), activation(), Counting())]
    ours = Loss(nn.Sequential(*layers)).train()
    eager = copy.deepcopy(ours)
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (ours, eager)]
    trainer = None
    if loop == "trainer":
        trainer = onward.Trainer(ours, steps[0], options={"memory_budget": budget})
    else:
        onward.accelerate(ours, memory_budget=budget)
    for i in range(3):
        for m, optimizer in zip((ours, eager), steps, strict=True):
            if m is ours and trainer is not None:
                trainer.train_step(x=x(i, 16, 5))
                continue
            optimizer.zero_grad()
            m(x(i, 16, 5)).backward()
            optimizer.step()
        for (name, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-5, msg=lambda t, n=name: f"{n} {t}")
    assert [m.calls for m in ours.modules() if isinstance(m, Counting)] == [3] * 4


def test_a_hook_on_what_a_part_is_given_sees_the_whole_gradient() -> None:
    class Hooks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.requires_grad:
                x.register_hook(lambda g: g * 0.5)
            return x * float(x.detach().numpy().std())

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part = nn.Linear(D, D), Hooks()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.first(x)
            return (self.part(h) + h.sin()).pow(2).mean()

    torch.manual_seed(0)
    twins = Twins(Net())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerWarning)
        for i in range(2):
            twins.zero()
            twins.step(lambda m, i=i: m(x(i)))
