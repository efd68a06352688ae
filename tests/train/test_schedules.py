"""Every scheduler of torch and of transformers against a plain loop: same numbers, one capture, no
warning, whether it was made before the Trainer or after."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as torchs
from torch.optim.swa_utils import SWALR

import onward
import onward.compile
from onward import OnwardError

loss_fn = nn.functional.cross_entropy
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(6) % 3
SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: torchs.LambdaLR(o, [lambda n: 1 / (n + 1), lambda n: 0.9**n]),
    "MultiplicativeLR": lambda o: torchs.MultiplicativeLR(o, lambda _: 0.8),
    "StepLR": lambda o: torchs.StepLR(o, 2),
    "MultiStepLR": lambda o: torchs.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: torchs.ConstantLR(o, total_iters=3),
    "LinearLR": lambda o: torchs.LinearLR(o, total_iters=4),
    "ExponentialLR": lambda o: torchs.ExponentialLR(o, 0.7),
    "SequentialLR": lambda o: torchs.SequentialLR(
        o, [torchs.ConstantLR(o), torchs.ExponentialLR(o, 0.5)], milestones=[2]
    ),
    "CosineAnnealingLR": lambda o: torchs.CosineAnnealingLR(o, T_max=4),
    "ChainedScheduler": lambda o: torchs.ChainedScheduler(
        [torchs.ConstantLR(o), torchs.ExponentialLR(o, 0.5)]
    ),
    "ReduceLROnPlateau": lambda o: torchs.ReduceLROnPlateau(o, patience=0, threshold=10.0),
    "CyclicLR": lambda o: torchs.CyclicLR(o, 0.01, 0.2, step_size_up=2),  # momentum too
    "CosineAnnealingWarmRestarts": lambda o: torchs.CosineAnnealingWarmRestarts(o, T_0=2),
    "OneCycleLR": lambda o: torchs.OneCycleLR(o, 0.2, total_steps=8),  # momentum or beta1 too
    "PolynomialLR": lambda o: torchs.PolynomialLR(o, total_iters=5, power=2.0),
    "SWALR": lambda o: SWALR(o, swa_lr=0.3, anneal_epochs=3),
}
KINDS: dict[str, Any] = {
    "adamw": lambda g: torch.optim.AdamW(g, lr=0.05, weight_decay=0.1),
    "momentum": lambda g: torch.optim.SGD(g, lr=0.1, momentum=0.9),
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def groups(model: nn.Sequential) -> list[dict[str, Any]]:
    return [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]


def advance(scheduler: Any, loss: torch.Tensor) -> None:
    plateau = isinstance(scheduler, torchs.ReduceLROnPlateau)
    scheduler.step(float(loss)) if plateau else scheduler.step()


def test_the_table_is_whole() -> None:
    assert set(torchs.__all__) - {"LRScheduler"} == set(SCHEDULERS) - {"SWALR"}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("name", "kind", "first"),
    [(n, "momentum" if i % 2 else "adamw", bool(i // 2 % 2)) for i, n in enumerate(SCHEDULERS)]
    + [("OneCycleLR", "momentum", True), ("CyclicLR", "adamw", False)],
)
def test_schedule_is_torchs_and_captured_once(
    name: str, kind: str, first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`first`: the scheduler is there before the Trainer. Warnings are errors here."""
    seen: list[int] = []
    plain = onward.compile.Compiler.plan
    monkeypatch.setattr(
        onward.compile.Compiler, "plan", lambda *a, **k: (seen.append(1), plain(*a, **k))[1]
    )
    model, twin = net(), net()
    ours, theirs = KINDS[kind](groups(model)), KINDS[kind](groups(twin))
    mine = SCHEDULERS[name](ours) if first else None
    trainer = onward.Trainer(model, ours, loss_fn=loss_fn)
    mine = mine or SCHEDULERS[name](ours)
    other = SCHEDULERS[name](theirs)
    moved, plans = set(), 0
    for step in range(6):
        if step == 3 and name in ("StepLR", "LinearLR", "CosineAnnealingLR"):
            state = copy.deepcopy(mine.state_dict())
            mine = SCHEDULERS[name](ours)
            mine.load_state_dict(state)
            for group, right in zip(ours.param_groups, theirs.param_groups, strict=True):
                group.update({k: v for k, v in right.items() if k != "params"})
        result = trainer.train_step(X, Y)
        theirs.zero_grad()
        loss = loss_fn(twin(X), Y)
        loss.backward()
        theirs.step()
        moved.add(ours.param_groups[0]["lr"])
        assert result.lr == theirs.param_groups[0]["lr"]
        advance(mine, result.loss)
        advance(other, loss.detach())
        plans = plans or len(seen)
        if first and not step:
            with pytest.raises(OnwardError, match="train_step"):
                ours.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert len(moved) > 1
    assert len(seen) == plans, "a schedule costs no plan"


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup", "polynomial"])
def test_schedules_of_transformers(kind: str) -> None:
    from transformers import get_scheduler

    rates = []
    for ours in (True, False):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = onward.Trainer(model, optimizer, loss_fn=loss_fn) if ours else None
        scheduler = get_scheduler(kind, optimizer, num_warmup_steps=2, num_training_steps=6)
        found = []
        for _ in range(3):
            if trainer is not None:
                found.append(trainer.train_step(X, Y).lr)
            else:
                found.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
            scheduler.step()
        rates.append(found)
    assert rates[0] == rates[1]


def test_learning_rate_as_a_tensor() -> None:
    model, twin = net(), net()
    ours = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.05))
    theirs = torch.optim.AdamW(twin.parameters(), lr=torch.tensor(0.05))
    trainer = onward.Trainer(model, ours, loss_fn=loss_fn)
    schedulers = [torchs.ExponentialLR(o, 0.5) for o in (ours, theirs)]
    for _ in range(3):
        trainer.train_step(X, Y)
        theirs.zero_grad()
        loss_fn(twin(X), Y).backward()
        theirs.step()
        for scheduler in schedulers:
            scheduler.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)
    assert float(ours.param_groups[0]["lr"]) == pytest.approx(0.05 / 8)
