"""onward.fit beside transformers' Trainer: events, logs, schedule, best model, early stopping."""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_runs import (
    BATCH,
    DATA,
    TRAIN,
    Recorder,
    by_onward,
    by_transformers,
    collate,
    loaders,
    model,
)
from torch import nn
from transformers import EarlyStoppingCallback, TrainerCallback

import onward
from onward.fitting import FitResult

RUNS: dict[str, dict[str, Any]] = {
    "by epoch": {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 2},
    "by steps": {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 4,
        "max_steps": 7,
    },
    "a schedule with a warmup": {
        "lr_scheduler_type": "cosine", "warmup_steps": 3, "num_train_epochs": 2,
    },
    "no evaluation": {"num_train_epochs": 1.5, "logging_first_step": True},
    "logs by epoch": {"logging_strategy": "epoch", "num_train_epochs": 2},
    "the best model by a metric": {
        "eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy", "num_train_epochs": 4, "save_total_limit": 1,
    },
    "the best model by the loss": {
        "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
        "load_best_model_at_end": True, "num_train_epochs": 3,
    },
    "late evaluations": {"eval_strategy": "steps", "eval_steps": 1, "eval_delay": 3,
        "num_train_epochs": 1},
}  # fmt: skip


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("name", RUNS)
def test_events_logs_and_weights_are_those_of_transformers(
    name: str, window: int, tmp_path: Path
) -> None:
    options = {"logging_steps": 2, "save_strategy": "no", "lr_scheduler_type": "constant"}
    options |= RUNS[name]
    theirs, ours = model(), model()
    stops = "load_best_model_at_end" in options
    recorders = Recorder(), Recorder()
    callbacks = [[r, EarlyStoppingCallback(1)] if stops else [r] for r in recorders]
    given = by_transformers(theirs, window, tmp_path / "theirs", callbacks[0], **options)
    found = by_onward(ours, window, tmp_path / "ours", callbacks[1], **options)

    wanted = [e for e in recorders[0].seen if e[0] != "on_pre_optimizer_step"]
    assert recorders[1].seen == wanted
    for own, other in zip(found.log_history, given.state.log_history, strict=True):
        assert own["step"] == other["step"]
        for key in ("loss", "grad_norm", "eval_loss", "eval_accuracy", "epoch", "train_loss"):
            assert (key in own) == (key in other), key
            if key in own:
                assert own[key] == pytest.approx(other[key], rel=1e-4, abs=1e-6), key
    if given.state.best_metric is not None:
        assert found.best_metric == pytest.approx(given.state.best_metric, rel=1e-5)
    if given.state.best_model_checkpoint is not None:
        path = Path(given.state.best_model_checkpoint)
        assert found.best_model_checkpoint == str(tmp_path / "ours" / path.name)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_evaluate", "on_substep_end"])
def test_a_callback_ends_training(event: str, tmp_path: Path) -> None:
    def stop(name: str, state: Any, control: Any) -> None:
        if name == event:
            control.should_training_stop = True

    recorders = Recorder(stop), Recorder(stop)
    options = {"eval_strategy": "epoch", "num_train_epochs": 3, "logging_steps": 2}
    window = 2 if event == "on_substep_end" else 1
    given = by_transformers(
        model(), window, tmp_path / "theirs", [recorders[0]], **options, save_strategy="no"
    )
    found = by_onward(model(), window, tmp_path / "ours", [recorders[1]], **options)
    assert found.global_step == given.state.global_step
    assert (found.global_step > 0) == (event != "on_substep_end")
    left_out = ["on_pre_optimizer_step", *([] if found.global_step else ["on_log"])]
    theirs, ours = ([e for e in r.seen if e[0] not in left_out] for r in recorders)
    assert ours == theirs


def test_a_callback_ends_an_epoch(tmp_path: Path) -> None:
    def stop(name: str, state: Any, control: Any) -> None:
        if name == "on_step_end" and state.global_step == 2:
            control.should_epoch_stop = True

    loader = onward.data.ResumableDataLoader(DATA, BATCH, collate_fn=collate)
    trainer = onward.Trainer(model(), onward.optim.SGD(lr=0.1))
    found = onward.fit(trainer, loader, options={"max_steps": 4}, callbacks=[Recorder(stop)])
    assert found.global_step == 4
    assert (loader.epoch, loader.samples) == (1, 2 * BATCH)  # the first epoch ended after two


# ---- resuming


class Stop(TrainerCallback):
    """Ends the run by an exception, as a kill would, after an update or its checkpoint."""

    def __init__(self, at: int, saved: bool) -> None:
        self.at, self.saved = at, saved

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self.at and not self.saved:
            raise KeyboardInterrupt

    def on_save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == self.at and self.saved:
            raise KeyboardInterrupt


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("stops", [(3,), (6,), (2, 5, 8), (2, 3, 4)])
def test_a_resumed_run_is_the_uninterrupted_one(
    stops: tuple[int, ...], saved: bool, tmp_path: Path
) -> None:
    options = {
        "num_train_epochs": 3, "eval_strategy": "epoch", "save_strategy": "steps",
        "save_steps": 1, "save_total_limit": 2, "logging_steps": 2, "lr_scheduler_type": "linear",
        "load_best_model_at_end": True, "output_dir": str(tmp_path / "run"),
    }  # fmt: skip

    def run(at: int | None, resume: bool, folder: str) -> tuple[nn.Module, FitResult]:
        net = model()
        trainer = onward.Trainer(
            net,
            torch.optim.AdamW(net.parameters(), lr=0.1),
            options={"gradient_accumulation_steps": 2},
        )
        found = onward.fit(
            trainer,
            onward.data.ResumableDataLoader(DATA, BATCH, seed=5, collate_fn=collate),
            loaders()[1],
            options=options | {"resume_from_checkpoint": resume, "output_dir": folder},
            callbacks=[EarlyStoppingCallback(2), *([] if at is None else [Stop(at, saved)])],
        )
        return net, found

    whole, wanted = run(None, False, str(tmp_path / "whole"))
    for i, at in enumerate(stops):
        with pytest.raises(KeyboardInterrupt):
            run(at, i > 0, str(tmp_path / "run"))
    net, found = run(None, True, str(tmp_path / "run"))
    for a, b in zip(net.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)
    assert found.global_step == wanted.global_step
    assert found.best_metric == wanted.best_metric
    timed = ("runtime", "per_second", "train_loss")
    kept = [
        [{k: v for k, v in entry.items() if not k.endswith(timed)} for entry in each.log_history]
        for each in (found, wanted)
    ]
    assert kept[0] == kept[1]


def test_a_run_with_nothing_left_does_nothing(tmp_path: Path) -> None:
    def run(resume: bool) -> FitResult:
        net = model()
        loader = onward.data.ResumableDataLoader(DATA, BATCH, collate_fn=collate)
        return onward.fit(
            onward.Trainer(net, onward.optim.SGD(lr=0.1)),
            loader,
            options={
                "max_steps": 3,
                "save_strategy": "steps",
                "save_steps": 3,
                "output_dir": str(tmp_path),
                "resume_from_checkpoint": resume,
            },
        )

    assert run(False).global_step == 3
    again = run(True)
    assert again.global_step == 3
    assert math.isnan(again.training_loss)


def test_a_trainer_may_be_fitted_twice(tmp_path: Path) -> None:
    trainer = onward.Trainer(model(), onward.optim.SGD(lr=0.1))
    for _ in range(2):
        found = onward.fit(trainer, loaders()[0], options={"num_train_epochs": 1})
        assert found.global_step == math.ceil(TRAIN / BATCH)
    assert trainer.registered == []
    assert trainer.updates == 2 * math.ceil(TRAIN / BATCH)


# ---- what is refused


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "epochs": ({"num_train_epochs": 0}, "num_train_epochs=0"),
    "an unknown option": ({"max_step": 3}, "max_steps"),
    "a schedule of no such name": ({"lr_scheduler_type": "cosin"}, "cosin"),
    "warmup alone": ({"warmup_steps": 3}, "lr_scheduler_type"),
    "no folder": ({"save_strategy": "epoch"}, "output_dir"),
    "no folder for the best": (
        {"load_best_model_at_end": True, "eval_strategy": "epoch"}, "output_dir",
    ),
    "the best without evaluation": (
        {"load_best_model_at_end": True, "output_dir": "x"}, "eval_strategy",
    ),
    "nothing to evaluate": ({"eval_strategy": "epoch"}, "eval_dataloader"),
    "saves of no number": ({"save_total_limit": 0}, "save_total_limit=0"),
    "an interval": ({"logging_steps": 0.5}, "logging_steps=0.5"),
    "a loader without a position": (
        {"resume_from_checkpoint": "x"}, "ResumableDataLoader",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_in_a_line(name: str) -> None:
    options, words = REFUSED[name]
    trainer = onward.Trainer(net := model(), onward.optim.SGD(lr=0.1))
    before = copy.deepcopy(net.state_dict())
    with pytest.raises((onward.OnwardError, ValueError), match=words) as error:
        onward.fit(trainer, loaders()[0], options=options)
    assert len(str(error.value)) < 450  # an unknown option lists those that there are
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    assert trainer.registered == []


def test_a_metric_that_is_not_there(tmp_path: Path) -> None:
    trainer = onward.Trainer(model(), onward.optim.SGD(lr=0.1))
    train, held_out = loaders()
    options = {"eval_strategy": "epoch", "metric_for_best_model": "rouge", "num_train_epochs": 1}
    with pytest.raises(onward.OnwardError, match="'rouge' is not in the evaluation"):
        onward.fit(trainer, train, held_out, options=options)


def test_an_iterable_without_length_needs_max_steps() -> None:
    trainer = onward.Trainer(model(), onward.optim.SGD(lr=0.1))
    batches = loaders()[0]
    with pytest.raises(onward.OnwardError, match="max_steps"):
        onward.fit(trainer, (b for b in batches))
    found = onward.fit(trainer, (b for b in batches), options={"max_steps": 4})
    assert found.global_step == 4


def test_data_that_ends_early_is_told() -> None:
    trainer = onward.Trainer(model(), onward.optim.SGD(lr=0.1))
    with pytest.raises(onward.OnwardError, match="gave no batch"):
        onward.fit(trainer, (b for b in loaders()[0]), options={"max_steps": 40})


def test_a_reporter_gets_the_logs(caplog: pytest.LogCaptureFixture) -> None:
    class Noting(onward.Reporter):
        def __init__(self) -> None:
            super().__init__("none")
            self.told: list[tuple[int, set[str]]] = []

        def log(self, step: Any, metrics: Any) -> None:
            self.told.append((int(step), set(metrics)))

    caplog.set_level(logging.WARNING)
    reporter = Noting()
    trainer = onward.Trainer(model(), onward.optim.SGD(lr=0.1))
    train, held_out = loaders()
    options = {"num_train_epochs": 1, "logging_steps": 3, "eval_strategy": "epoch"}
    onward.fit(trainer, train, held_out, options=options, reporter=reporter)
    assert [step for step, _ in reporter.told] == [3, 6, 6, 6]
    assert "eval_loss" in reporter.told[2][1]
    assert not caplog.records
