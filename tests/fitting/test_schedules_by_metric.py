"""Schedules that go by a metric are stepped after each evaluation, as in transformers' Trainer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

import onward
from onward import OnwardError

BATCH, BATCHES = 4, 5


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def batches(seed: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    seeded = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(BATCH, 6, generator=seeded), torch.randint(0, 3, (BATCH,), generator=seeded))
        for _ in range(count)
    ]


TRAIN, EVAL = batches(0, BATCHES), batches(1, 2)
loss_fn = nn.functional.cross_entropy


def schedule(optimizer: torch.optim.Optimizer, **settings: Any) -> ReduceLROnPlateau:
    """One that often falls: no improvement is large enough."""
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9, **settings)


def eager(epochs: int) -> tuple[nn.Module, list[float], list[float]]:
    """A plain loop: the model, the learning rate of each epoch, and the losses evaluated."""
    model = made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4)
    falling, rates, losses = schedule(optimizer), list[float](), list[float]()
    for _ in range(epochs):
        rates.append(optimizer.param_groups[0]["lr"])
        for x, y in TRAIN:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
        with torch.no_grad():
            losses.append(sum(float(loss_fn(model(x), y)) for x, y in EVAL) / len(EVAL))
        falling.step(losses[-1])
    return model, rates, losses


def trainer_of(model: nn.Module) -> onward.Trainer:
    return onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.4), loss_fn)


def options(**more: Any) -> dict[str, Any]:
    return {"eval_strategy": "epoch", "logging_strategy": "epoch", "num_train_epochs": 4, **more}


def test_the_rate_falls_after_evaluations_as_in_a_plain_loop() -> None:
    twin, rates, losses = eager(4)
    model = made()
    trainer = trainer_of(model)
    found = onward.fit(
        trainer, TRAIN, EVAL, options=options(), lr_scheduler=schedule(trainer.optimizer)
    )
    assert len(set(rates)) > 2
    logged = [x["learning_rate"] for x in found.log_history if "learning_rate" in x]
    assert logged == pytest.approx(rates)
    evaluated = [x["eval_loss"] for x in found.log_history if "eval_loss" in x]
    assert evaluated == pytest.approx(losses, rel=1e-4)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)


def test_a_named_metric_is_the_one_that_counts() -> None:
    seen: list[float] = []

    class Noting(ReduceLROnPlateau):
        def step(self, metrics: Any, epoch: Any = None) -> None:
            seen.append(metrics)
            super().step(metrics, epoch)

    model = made()
    trainer = trainer_of(model)
    found = onward.fit(
        trainer,
        TRAIN,
        EVAL,
        options=options(metric_for_best_model="odd"),
        lr_scheduler=Noting(trainer.optimizer, mode="max"),
        compute_metrics=lambda _: {"odd": float(len(seen))},
    )
    assert seen == [0.0, 1.0, 2.0, 3.0]
    assert found.metrics["eval_odd"] == 3.0


def test_transformers_name_of_it() -> None:
    """The scheduler that transformers makes by this name has a patience of ten evaluations."""
    model = made()
    trainer = trainer_of(model)
    chosen = options(
        lr_scheduler_type="reduce_lr_on_plateau",
        eval_strategy="steps",
        eval_steps=1,
        metric_for_best_model="same",
    )
    onward.fit(trainer, TRAIN, EVAL, options=chosen, compute_metrics=lambda _: {"same": 1.0})
    assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(0.04)


def test_it_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    rows = [{"input": x, "target": y} for xs, ys in TRAIN for x, y in zip(xs, ys, strict=True)]

    def run(folder: str, **more: Any) -> tuple[nn.Module, float]:
        model = made()
        trainer = trainer_of(model)
        loader = onward.data.ResumableDataLoader(
            rows,
            BATCH,
            collate_fn=lambda found: tuple(
                torch.stack([row[name] for row in found]) for name in ("input", "target")
            ),
        )
        chosen = options(output_dir=str(tmp_path / folder), save_strategy="epoch")
        onward.fit(
            trainer,
            loader,
            EVAL,
            options=chosen | more,
            lr_scheduler=schedule(trainer.optimizer),
        )
        return model, trainer.optimizer.param_groups[0]["lr"]

    whole, rate = run("whole")
    middle = str(tmp_path / "whole" / f"checkpoint-{2 * BATCHES}")
    parts, same = run("parts", resume_from_checkpoint=middle)
    assert rate == same < 0.1
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(p, q)


class ByEpoch:
    """A scheduler like timm's, whose step needs the number of the epoch."""

    def step(self, epoch: int) -> None:
        raise AssertionError("it is refused")


class Passing:
    """A scheduler like accelerate's, which passes on whatever it gets."""

    steps = 0

    def step(self, *args: Any, **kwargs: Any) -> None:
        assert not args
        self.steps += 1


REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no evaluation": (
        schedule, {"eval_strategy": "no"},
        "ReduceLROnPlateau.step takes a metric, and eval_strategy is 'no'; fix: eval_strategy",
    ),
    "by name": (
        lambda o: None, {"eval_strategy": "no", "lr_scheduler_type": "reduce_lr_on_plateau"},
        "ReduceLROnPlateau.step takes a metric, and eval_strategy is 'no'; fix: eval_strategy",
    ),
    "another argument": (lambda o: ByEpoch(), {}, "ByEpoch.step needs epoch, which .* fix: a"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_stepped_is_refused_before_anything_is_trained(name: str) -> None:
    make, chosen, said = REFUSED[name]
    model = made()
    before = copy.deepcopy(model.state_dict())
    trainer = trainer_of(model)
    with pytest.raises(OnwardError, match=said) as found:
        onward.fit(
            trainer,
            TRAIN,
            EVAL,
            options=options(**chosen),
            lr_scheduler=make(trainer.optimizer),
        )
    assert "\n" not in str(found.value)
    assert trainer.updates == 0
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[key])


def test_a_scheduler_of_any_arguments_is_stepped_after_updates() -> None:
    trainer, scheduler = trainer_of(made()), Passing()
    onward.fit(trainer, TRAIN, EVAL, options=options(), lr_scheduler=scheduler)
    assert scheduler.steps == trainer.updates == 4 * BATCHES
