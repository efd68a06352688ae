"""onward.Module: the face of a wrapper, and accelerated models within and around each other."""

from __future__ import annotations

import copy
import pickle  # noqa: TID251
from typing import Any

import pytest
import tiny
import torch
from models import Positional, W
from torch import nn
from twins import CLOSE, Twins, assert_same, total

import onward
from onward.errors import OnwardError
from onward.module import accelerated


def x(seed: int = 0, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, W, generator=torch.Generator().manual_seed(seed))


class Own(Positional):
    kind = "own"

    def __init__(self) -> None:
        super().__init__()
        self.number = 3
        self.register_buffer("seen", torch.zeros(2))

    def greet(self, name: str) -> str:
        return f"{name} {self.number}"

    @property
    def twofold(self) -> int:
        return 2 * self.number


def test_attributes_are_the_model_s() -> None:
    model = Own()
    wrapped = onward.Module(model)
    assert wrapped.module is model
    assert wrapped.greet("hello") == "hello 3"
    assert (wrapped.kind, wrapped.twofold) == ("own", 6)
    wrapped.number = 5
    assert model.number == 5
    wrapped.fresh = "new"
    assert model.fresh == "new"
    del wrapped.fresh
    assert not hasattr(model, "fresh")
    with pytest.raises(AttributeError, match="nothing"):
        wrapped.nothing  # noqa: B018
    assert wrapped.a is model.a
    wrapped.a = nn.Linear(W, W, bias=False)
    assert model.a.bias is None
    assert {"greet", "a", "number", "report"} <= set(dir(wrapped))
    total(wrapped(x())).backward()
    assert wrapped.report()["launches"]


def test_names_and_states_have_no_prefix() -> None:
    plain = Own()
    model: Any = onward.Module(Own())
    assert list(model.state_dict()) == list(plain.state_dict())
    for names in ("named_parameters", "named_buffers"):
        ours, theirs = getattr(model, names)(), getattr(plain, names)()
        assert [n for n, _ in ours] == [n for n, _ in theirs]
    assert len(list(model.parameters())) == len(list(plain.parameters()))
    model.load_state_dict({k: v + 1 for k, v in plain.state_dict().items()})
    torch.testing.assert_close(model.module.a.bias, plain.a.bias + 1)
    assert model.load_state_dict({}, strict=False).missing_keys
    plain.load_state_dict(model.state_dict())


def test_modes_and_moves_reach_the_model() -> None:
    model: Any = onward.Module(Own())
    model.eval()
    assert not model.module.training
    assert not model.module.a.training
    model.train()
    assert model.module.a.training
    assert model.to("cpu") is model
    model.requires_grad_(False)
    assert not model.module.a.weight.requires_grad
    model.zero_grad()
    model.apply(lambda m: None)


def test_copies_stay_accelerated() -> None:
    model = onward.Module(Own(), strict=True)
    model(x())
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        held = accelerated(twin.module)
        assert held is not None
        assert held.options.strict
        torch.testing.assert_close(twin(x()), model(x()))
        assert twin.a is not model.a


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(OnwardError, match=r"takes a torch\.nn\.Module"):
        onward.Module(3)  # type: ignore[arg-type]


def test_a_whole_loop() -> None:
    torch.manual_seed(0)
    plain = tiny.bert(0.0)
    model = onward.Module(copy.deepcopy(plain))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain)]
    for step in range(4):
        losses = []
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            out = m(**tiny.batch(4, 12, "right", seed=step))
            out.loss.backward()
            optimizer.step()
            losses.append(float(out.loss.detach()))
        assert losses[0] == pytest.approx(losses[1], rel=1e-4)


# ---- several models


class Two(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("where", ["inner", "outer", "both", "chained", "wrapped within"])
def test_models_within_models(where: str) -> None:
    plain = Two(Positional(), Positional())
    model = copy.deepcopy(plain)
    if where in ("inner", "both", "chained"):
        onward.accelerate(model.first)
    if where == "chained":
        onward.accelerate(model.second)
    if where == "wrapped within":
        model.first = onward.Module(model.first)
    if where in ("outer", "both", "wrapped within"):
        onward.accelerate(model)
    for step in range(2):
        for m in (model, plain):
            m.zero_grad()
        ours, eager = model(x(step)), plain(x(step))
        assert_same(ours, eager)
        total(ours).backward()
        total(eager).backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, **CLOSE)
    if where == "both":
        held = accelerated(model.first)
        assert held is not None
        assert held._last is None, "within another's graph it is a part of that"


def test_a_backbone_that_two_models_share() -> None:
    plain = Positional()
    backbone = copy.deepcopy(plain)
    heads = [Two(backbone, nn.Linear(W, n)) for n in (2, 3)]
    theirs = [Two(plain, copy.deepcopy(h.second)) for h in heads]
    for head in heads:
        onward.accelerate(head)
    for step in range(2):
        for models in (heads, theirs):
            total([m(x(step)) for m in models]).backward()
        for p, q in zip(backbone.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, **CLOSE)


def test_two_towers_through_one_model() -> None:
    twins = Twins(tiny.bert(0.0, classes=2))
    for step in range(3):
        twins.zero()
        losses = []
        for model in twins.both:
            a, b = (
                model(
                    **{k: v for k, v in tiny.batch(4, n, "right", seed=s).items() if k != "labels"}
                )
                for n, s in ((12, step), (9, step + 10))
            )
            loss = nn.functional.cosine_embedding_loss(a.logits, b.logits, torch.ones(4))
            loss.backward()
            losses.append(float(loss.detach()))
        assert losses[0] == pytest.approx(losses[1], rel=1e-3, abs=1e-6)
        twins.same_gradients()


def test_a_trainer_over_an_accelerated_model() -> None:
    """A Trainer captures the model's own forward, and ignores that the model was accelerated."""
    plain = tiny.mlp()
    model = onward.accelerate(copy.deepcopy(plain))
    data, target = torch.randn(6, 8), torch.arange(6) % 5
    losses: list[Any] = []
    for m in (model, plain):
        trainer = onward.Trainer(
            m, torch.optim.SGD(m.parameters(), 0.1), loss_fn=nn.functional.cross_entropy
        )
        losses.append([float(trainer.train_step(data, target).loss) for _ in range(3)])
    assert losses[0] == losses[1]
