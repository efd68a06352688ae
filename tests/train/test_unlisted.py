"""Parameters that a forward reads and `model.parameters()` does not list: frozen ones are read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onward

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(3))
Y = torch.arange(6) % 5
HIDDEN = r"requires grad but is not in model\.parameters\(\); fix: register it"


class Net(nn.Module):
    def __init__(self, beside: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 5)
        object.__setattr__(self, "beside", beside)  # also where it is a module: not registered

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        beside: Any = getattr(self, "beside", None)
        return self.outer(torch.tanh(self.inner(x)) + beside(x))


def loss(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(y, target)


def trainer_of(model: nn.Module, loss_fn: Any = loss) -> onward.Trainer:
    return onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=loss_fn)


def follow(beside: Callable[[torch.Tensor], torch.Tensor], read: torch.Tensor) -> None:
    """Steps beside eager's; in between the tensor that is read is written."""
    model, twin = Net(beside), Net(beside)
    trainer, theirs = trainer_of(model), torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(3):
        theirs.zero_grad()
        expected = loss(twin(X), Y)
        expected.backward()
        theirs.step()
        assert trainer.train_step(X, Y).loss == pytest.approx(expected.item(), rel=1e-5)
        with torch.no_grad():
            read += 1


@pytest.mark.parametrize("how", ["no_grad", "detach", "frozen", "inference_mode"])
def test_a_teacher_beside_the_model_is_read(how: str) -> None:
    """No gradient reaches its parameters."""
    teacher = nn.Linear(8, 8)

    def beside(x: torch.Tensor) -> torch.Tensor:
        if how == "detach":
            return teacher(x).detach()
        if how == "frozen":
            return teacher(x)
        with torch.no_grad() if how == "no_grad" else torch.inference_mode():
            return teacher(x).clone()

    teacher.requires_grad_(how != "frozen")
    follow(beside, teacher.weight)


def test_a_module_set_on_a_parameter_is_read() -> None:
    """`getattr(weight, "partner")`, where it is frozen."""
    partner = nn.Linear(8, 8).requires_grad_(False)

    class Partnered(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: Any = getattr(self.inner.weight, "partner", None)
            return self.outer(torch.tanh(self.inner(x)) + found(x))

    losses = []
    for eager in (False, True):
        model = Partnered()
        object.__setattr__(model.inner.weight, "partner", copy.deepcopy(partner))
        trainer, optimizer = trainer_of(model), torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            if not eager:
                losses.append(float(trainer.train_step(X, Y).loss))
                continue
            optimizer.zero_grad()
            found = loss(model(X), Y)
            found.backward()
            optimizer.step()
            losses.append(found.item())
    assert losses[:2] == pytest.approx(losses[2:], rel=1e-5)


def _in_a_list() -> Net:
    held = [nn.Parameter(torch.ones(8))]
    return Net(lambda x: x + held[0])


def _in_a_module() -> Net:
    return Net(nn.Linear(8, 8))


def _on_a_parameter() -> Net:
    model = Net(lambda x: model.inner.weight.partner(x))  # type: ignore[operator]
    object.__setattr__(model.inner.weight, "partner", nn.Linear(8, 8))
    return model


UNLISTED = {f.__name__.strip("_"): f for f in (_in_a_list, _in_a_module, _on_a_parameter)}


@pytest.mark.parametrize("where", UNLISTED)
def test_a_parameter_to_train_is_refused(where: str) -> None:
    """Eager gives it a gradient, and someone may wait for that. An evaluation has none."""
    model = UNLISTED[where]()
    trainer = trainer_of(model)
    with pytest.raises(onward.CaptureError, match=HIDDEN):
        trainer.train_step(X, Y)
    with torch.no_grad():
        assert trainer.eval_step(X, Y).loss == pytest.approx(loss(model(X), Y).item(), rel=1e-5)


def test_of_a_loss_function_too() -> None:
    weight = nn.Parameter(torch.ones(5))
    with pytest.raises(onward.CaptureError, match=HIDDEN):
        trainer_of(Net(torch.tanh), lambda y, t: F.cross_entropy(y * weight, t)).train_step(X, Y)
