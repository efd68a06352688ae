"""What a forward has read of a configuration is guarded, and what lies beside it is not: whatever
field is set to another value, numbers are eager's, and only a field that was read costs a graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from single_layers import bert, gpt2, t5
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import onward


def llama() -> Any:
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=32, max_position_embeddings=32,
    ))  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {f.__name__: f for f in (bert, gpt2, llama, t5)}
IDS = torch.randint(3, 60, (3, 7), generator=torch.Generator().manual_seed(0))


def batch_of(name: str) -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, "labels": IDS[:, 0] % 2 if name == "bert" else IDS}


def another(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return 0.5 * value + 0.25
    if isinstance(value, str):
        return value + "_"
    if isinstance(value, dict):
        return {**value, "another": 1}
    return 1 if value is None else None


def outcome(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    """The loss of a step, or the class of the error that it raises."""
    try:
        with torch.no_grad():
            found = model(**batch)
            return (found["loss"] if isinstance(found, dict) else found[0]).item()
    except Exception as error:
        return type(error)


def assert_alike(ours: Any, eager: Any, field: str) -> None:
    if isinstance(eager, type):
        assert ours is eager, field
    else:
        assert ours == pytest.approx(eager, rel=1e-4), field


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::onward.errors.EagerWarning", "ignore::UserWarning")
def test_each_field_of_a_configuration(name: str, captures: list[int]) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]().eval(), batch_of(name)
    twin = copy.deepcopy(model)
    onward.accelerate(model)
    assert_alike(outcome(model, batch), outcome(twin, batch), "as it is")
    outcome(model, batch)
    fields, unread = list(vars(model.config)), 0
    for key in fields:
        known, before = len(captures), vars(model.config)[key]
        for held in (model.config, twin.config):
            vars(held)[key] = another(copy.deepcopy(before))
        assert_alike(outcome(model, batch), outcome(twin, batch), key)
        unread += len(captures) == known
        for held in (model.config, twin.config):
            vars(held)[key] = before
    assert unread > 0.6 * len(fields)
    known = len(captures)
    assert_alike(outcome(model, batch), outcome(twin, batch), "as it was")
    assert len(captures) <= known + 1


@dataclass
class Inner:
    scale: float = 1.0
    other: float = 1.0


@dataclass
class Settings:
    factor: float = 1.0
    branch: bool = False
    hidden: float = 1.0  # read in a branch
    inner: Inner = field(default_factory=Inner)
    turned: float = 1.0
    unread: float = 1.0
    listed: list[float] = field(default_factory=lambda: [1.0])

    @property
    def named(self) -> float:
        return 2.0 * self.turned


class Held(nn.Module):
    """A model whose forward reads a setting in each way that Python has."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.settings = nn.Linear(4, 4), Settings()
        self.read: Callable[[Settings], float] = lambda settings: settings.factor

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.layer(x) * self.read(self.settings)).square().mean()}


READS: dict[str, tuple[Callable[[Any], float], set[str]]] = {
    "attribute": (lambda s: s.factor, {"factor"}),
    "getattr": (lambda s: getattr(s, "fac" + "tor"), {"factor"}),
    "property": (lambda s: s.named, {"turned"}),
    "branch not taken": (lambda s: s.hidden if s.branch else 1.0, {"branch"}),
    "inner": (lambda s: s.inner.scale, {"inner.scale"}),
    "list": (lambda s: s.listed[0], {"listed"}),
    "vars": (lambda s: vars(s)["factor"], {"*"}),
    "dict": (lambda s: s.__dict__["factor"], {"*"}),
    "copy": (lambda s: copy.copy(s).factor, {"*"}),
    "deepcopy": (lambda s: copy.deepcopy(s).factor, {"*"}),
    "equal": (lambda s: 2.0 if s == Settings() else 1.0, {"*"}),
    "absent": (lambda s: getattr(s, "absent", 1.0), {"absent"}),
    "has": (lambda s: 3.0 if hasattr(s, "absent") else 1.0, {"absent"}),
}


def setting(path: str) -> Callable[[Settings], None]:
    def change(settings: Any) -> None:
        *way, last = path.split(".")
        for part in way:
            settings = getattr(settings, part)
        before = getattr(settings, last, None)
        setattr(settings, last, [3.0] if isinstance(before, list) else not before
                if isinstance(before, bool) else 3.0)  # fmt: skip

    return change


PATHS = ("factor", "branch", "hidden", "inner.scale", "inner.other", "turned", "unread", "listed",
         "absent")  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", READS)
def test_each_way_of_reading(way: str, captures: list[int]) -> None:
    torch.manual_seed(0)
    model, (read, names) = Held(), READS[way]
    model.read = read
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.ones(3, 4)
    trainer.train_step(x=x)
    for path in sorted(PATHS, key=lambda p: p in names):  # those that are read come last
        known = len(captures)
        setting(path)(model.settings)
        found = float(trainer.train_step(x=x).loss)
        assert found == pytest.approx(model(x)["loss"].item(), rel=1e-5), path
        if path not in names and "*" not in names:
            assert len(captures) == known, f"{path} is not read"


def test_a_plain_namespace_is_guarded_wholly() -> None:
    model = Held()
    held: Any = SimpleNamespace(factor=1.0, unread=1.0)
    model.settings = held
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.ones(3, 4)
    for factor in (1.0, 2.0, 3.0):
        held.factor = factor
        want = model(x)["loss"].item()
        assert float(trainer.train_step(x=x).loss) == pytest.approx(want, rel=1e-5)


def test_a_second_graph_guards_what_it_reads_too(captures: list[int]) -> None:
    class Two(Held):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            by = self.settings.factor if self.training else self.settings.turned
            return {"loss": (self.layer(x) * by).square().mean()}

    model = Two()
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.0))
    x = torch.ones(3, 4)
    trainer.train_step(x=x)
    model.settings.turned = 5.0  # before any graph reads it
    trainer.eval_step(x=x)
    assert len(captures) == 2
    for name in ("factor", "turned"):
        setattr(model.settings, name, 7.0)
        for step, mode in ((trainer.train_step, True), (trainer.eval_step, False)):
            model.train(mode)
            want = model(x)["loss"].item()
            assert float(step(x=x).loss) == pytest.approx(want, rel=1e-5), name
    known = len(captures)
    model.settings.unread = 7.0
    trainer.train_step(x=x)
    trainer.eval_step(x=x)
    assert len(captures) == known
    model.settings = copy.deepcopy(model.settings)  # another object that says the same
    trainer.train_step(x=x)
    assert len(captures) == known
    model.settings.factor = 9.0
    model.train()
    want = model(x)["loss"].item()
    assert float(trainer.train_step(x=x).loss) == pytest.approx(want, rel=1e-5)
