"""A value that a forward sets once and reads from then on costs one capture, whatever runs the
model: what a forward does is asked of the model's own code, not of a graph made of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import onward


class Once(nn.Module):
    """With dropout: two graphs, and a graph and eager code, draw other masks."""

    shared: Any = None

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(rate)
        self.config: Any = {}

    def seen(self) -> float:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.drop(self.layer(x)) * self.seen()).square().mean()}


class Flag(Once):
    def seen(self) -> float:
        self.first = True
        return 1.0 if self.first else 2.0


class Lazy(Once):
    value: Any = None

    def seen(self) -> float:
        if self.value is None:
            self.value = 1.5
        return self.value


class InADict(Once):
    def seen(self) -> float:
        return self.config.setdefault("kind", 1.5)


class InTheClass(Once):
    def seen(self) -> float:
        if type(self).shared is None:
            type(self).shared = 1.5
        return type(self).shared


class Table(Once):
    table: Any = None

    def seen(self) -> Any:
        if self.table is None:
            self.table = torch.arange(4.0).cos()
        return self.table


class Again(Once):
    n = 1

    def seen(self) -> float:
        self.n = 3
        return 1.0 + self.n


class Handing(nn.Module):
    """Hands everything on, as a wrapper of a distributed run does."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def run(model: nn.Module, steps: int = 3) -> list[float]:
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.linspace(-1, 1, 12).view(3, 4)
    return [float(trainer.train_step(x=x[: 3 - i % 2]).loss) for i in range(steps)]


@pytest.mark.parametrize("cls", [Flag, Lazy, InADict, InTheClass, Table], ids=lambda c: c.__name__)
def test_a_trainer_around_an_accelerated_model(cls: type[Once], captures: list[int]) -> None:
    cls.shared = None
    torch.manual_seed(0)
    model = cls(0.5).train()
    run(onward.accelerate(model))
    assert len(captures) == 1
    cls.shared = None
    torch.manual_seed(0)
    model = cls(0.0).train()
    eager = copy.deepcopy(model)
    found = run(onward.accelerate(model))
    x, optimizer = torch.linspace(-1, 1, 12).view(3, 4), torch.optim.SGD(eager.parameters(), lr=0.1)
    for i, loss in enumerate(found):
        optimizer.zero_grad()
        want = eager(x[: 3 - i % 2])["loss"]
        assert loss == pytest.approx(want.item(), rel=1e-5)
        want.backward()
        optimizer.step()


AROUND: dict[str, Any] = {
    "within Onward's": onward.Module,
    "within Onward's, handed on": lambda m: onward.Module(Handing(m)),
    "accelerated, handed on": lambda m: onward.accelerate(Handing(m)),
    "handed on to Onward's": lambda m: Handing(onward.Module(m)),
    "within Onward's twice": lambda m: onward.Module(Handing(onward.Module(m))),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("cls", [Again, Flag, Lazy, InADict, InTheClass, Table])
@pytest.mark.parametrize("around", AROUND)
def test_whatever_is_around_it(around: str, cls: type[Once], captures: list[int]) -> None:
    cls.shared = None
    torch.manual_seed(0)
    run(AROUND[around](cls(0.0).train()))
    assert len(captures) == 1


@pytest.mark.parametrize("labels", ["one of two", "several", "a number"])
def test_a_classification_head_sets_its_problem(labels: str, captures: list[int]) -> None:
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (4, 7))
    given = {
        "one of two": ids[:, 0] % 2, "several": (ids[:, :2] % 2).float(),
        "a number": ids[:, 0] / 60,
    }[labels]  # fmt: skip
    heads: Any = {"num_labels": 1 if labels == "a number" else 2}
    model = BertForSequenceClassification(BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, **heads,
    )).train()  # fmt: skip
    onward.accelerate(model)
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for size in (4, 3, 2, 4):
        trainer.train_step(input_ids=ids[:size], labels=given[:size])
    assert len(captures) == 1
    assert model.config.problem_type is not None
    with torch.no_grad():
        want = copy.deepcopy(model).eval()(input_ids=ids, labels=given).loss
    torch.testing.assert_close(trainer.eval_step(input_ids=ids, labels=given).loss, want)
    assert len(captures) == 1
