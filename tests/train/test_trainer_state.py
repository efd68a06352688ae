"""Saving, resuming, and a torch optimizer whose state is the session's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny import batch, bert, gpt2, mlp
from torch import nn

import onward
from onward import OnwardError

pytestmark = pytest.mark.usefixtures("captures_kept")

OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.2),
}


def trainer_of(model: nn.Module, name: str = "adamw", **more: Any) -> onward.Trainer:
    options = onward.TrainerOptions(**{"seed": 3, "max_grad_norm": 1.0, **more})
    return onward.Trainer(model, OPTIMIZERS[name](model), options=options)


def losses(trainer: onward.Trainer, seeds: range) -> list[float]:
    return [float(trainer.train_step(batch(seed=s)).loss) for s in seeds]


def assert_equal_models(a: nn.Module, b: nn.Module) -> None:
    for (name, p), q in zip(a.named_parameters(), b.named_parameters(), strict=True):
        assert torch.equal(p, q[1]), name


@pytest.mark.sample(6)
@pytest.mark.parametrize("at", [0, 2, 3], ids=["before any step", "window's end", "mid window"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_resume_is_bitwise_with_dropout_and_accumulation(name: str, at: int) -> None:
    more = {"gradient_accumulation_steps": 2}
    whole = trainer_of(gpt2(layers=1), name, **more)
    losses(whole, range(at))
    state = copy.deepcopy(whole.state_dict())
    expected = losses(whole, range(at, 6))
    other = gpt2(layers=1)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    resumed = trainer_of(other, name, **{**more, "seed": 99})
    resumed.load_state_dict(state)
    assert losses(resumed, range(at, 6)) == expected
    assert_equal_models(whole.model, resumed.model)
    assert resumed.updates == whole.updates == 3


@pytest.mark.parametrize("name", ["adamw", "momentum"])
def test_going_back_on_one_trainer(name: str) -> None:
    """A state loaded over a later one leaves nothing of the later one behind."""
    trainer = trainer_of(gpt2(layers=1), name, gradient_accumulation_steps=2)
    start = trainer.state_dict()
    first = losses(trainer, range(5))
    trainer.load_state_dict(start)
    assert losses(trainer, range(5)) == first


def test_state_is_a_copy() -> None:
    trainer = trainer_of(gpt2(layers=1))
    losses(trainer, range(1))
    state = trainer.state_dict()
    kept = copy.deepcopy(state)
    losses(trainer, range(2))
    for part in ("model", "optimizer"):
        assert state[part].keys() == kept[part].keys() != set()
        for k in kept[part]:
            assert torch.equal(state[part][k], kept[part][k])


def without(state: dict[str, Any], part: str) -> dict[str, Any]:
    out = copy.deepcopy(state)
    out[part].pop(next(iter(out[part])))
    return out


def reshaped(state: dict[str, Any], part: str) -> dict[str, Any]:
    out = copy.deepcopy(state)
    name = next(k for k, v in out[part].items() if v.dim() == 2)
    out[part][name] = torch.zeros(2, 2)
    return out


def renamed(state: dict[str, Any], part: str) -> dict[str, Any]:
    out = copy.deepcopy(state)
    name = next(iter(out[part]))
    out[part]["nobody.knows"] = out[part].pop(name)
    return out


SPOILT = [
    (without, "model"),  # an optimizer may lack some: a parameter without an update has no state
    *((spoil, part) for spoil in (reshaped, renamed) for part in ("model", "optimizer")),
]


@pytest.mark.parametrize(("spoil", "part"), SPOILT)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(spoil: Any, part: str) -> None:
    trainer = trainer_of(gpt2(layers=1))
    losses(trainer, range(2))
    before = trainer.state_dict()
    moved = copy.deepcopy(before)
    for tensor in moved["model"].values():
        tensor.add_(1.0)
    with pytest.raises(OnwardError, match="does not fit"):
        trainer.load_state_dict(spoil(moved, part))
    after = trainer.state_dict()
    for key in ("model", "optimizer"):
        assert before[key].keys() == after[key].keys()
        assert all(torch.equal(before[key][k], after[key][k]) for k in before[key])


# ---- torch's optimizer


@pytest.mark.sample(16)
@pytest.mark.parametrize("make", [gpt2, bert], ids=["gpt2", "bert"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_state_round_trips_through_torch(name: str, make: Any) -> None:
    """`optimizer.state_dict()` into a fresh optimizer and a fresh Trainer goes on the same way.

    Loaded before the Trainer is made, and after.
    """
    whole = trainer_of(make(layers=1, dropout=0.0), name)
    losses(whole, range(3))
    weights = copy.deepcopy(whole.model.state_dict())
    state = copy.deepcopy(whole.optimizer.state_dict())
    expected = losses(whole, range(3, 6))
    for early in (True, False):
        model = make(layers=1, dropout=0.0)
        model.load_state_dict(weights)
        optimizer = OPTIMIZERS[name](model)
        if early:
            optimizer.load_state_dict(state)
        options = onward.TrainerOptions(seed=3, max_grad_norm=1.0)
        trainer = onward.Trainer(model, optimizer, options=options)
        if not early:
            optimizer.load_state_dict(state)
        assert losses(trainer, range(3, 6)) == expected, f"loaded {'before' if early else 'after'}"
        assert_equal_models(whole.model, model)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_torch_can_go_on_where_onward_stopped(name: str) -> None:
    """The state is in torch's own layout: another torch optimizer takes it over."""
    model = mlp()
    loss_fn = nn.functional.cross_entropy
    x, y = torch.randn(6, 8), torch.arange(6) % 5
    twin = copy.deepcopy(model)
    reference = OPTIMIZERS[name](twin)
    trainer = onward.Trainer(model, OPTIMIZERS[name](model), loss_fn=loss_fn)
    for _ in range(3):
        trainer.train_step(x, y)
    fresh = OPTIMIZERS[name](model)
    fresh.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))
    for i in range(5):
        for m, optimizer in ((twin, reference), (model, fresh)):
            if m is model and i < 3:
                continue
            optimizer.zero_grad()
            loss_fn(m(x), y).backward()
            optimizer.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_state_tensors_are_views_of_the_sessions() -> None:
    model = gpt2(layers=1)
    trainer = trainer_of(model)
    losses(trainer, range(1))
    parameters = list(model.parameters())
    before = {p: dict(trainer.optimizer.state[p]) for p in parameters}
    kept = {p: before[p]["exp_avg"].clone() for p in parameters}
    losses(trainer, range(1, 2))
    for p in parameters:
        now = trainer.optimizer.state[p]
        assert set(now) == {"step", "exp_avg", "exp_avg_sq"}
        assert float(now["step"]) == 2
        assert now["exp_avg"].data_ptr() == before[p]["exp_avg"].data_ptr()
        assert now["exp_avg"].shape == p.shape
        assert not torch.equal(now["exp_avg"], kept[p])
    with torch.no_grad():
        for p in parameters:  # what the user writes there is what the next step reads
            trainer.optimizer.state[p]["exp_avg"].zero_()
            trainer.optimizer.state[p]["exp_avg_sq"].fill_(1e30)
    weights = [p.detach().clone() for p in parameters]
    for group in trainer.optimizer.param_groups:
        group["weight_decay"] = 0.0
    losses(trainer, range(2, 3))
    for p, q in zip(parameters, weights, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-8)


def test_own_step_of_the_optimizer_raises() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = onward.Trainer(model, optimizer, loss_fn=nn.functional.cross_entropy)
    kept = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(OnwardError, match="train_step"):
        optimizer.step()
    with pytest.raises(OnwardError, match="train_step"):
        trainer.optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), kept, strict=True))


def test_steps_are_counted_for_each_parameter_by_itself() -> None:
    """One tensor shared by all would be advanced once a parameter by torch's own step."""
    trainer = trainer_of(gpt2(layers=1))
    losses(trainer, range(2))
    steps = [s["step"] for s in trainer.optimizer.state_dict()["state"].values()]
    assert [float(s) for s in steps] == [2.0] * len(list(trainer.model.parameters()))
    assert len({s.data_ptr() for s in steps}) == len(steps)
