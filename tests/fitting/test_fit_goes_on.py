"""onward.fit goes on from ended runs, with other batches, in moved folders, and past NaN losses."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import fit_runs
import pytest
import safetensors.torch
import torch
from fit_runs import (
    DATA,
    TRAIN,
    Classifier,
    Recorder,
    by_onward,
    by_transformers,
    collate,
    fitted,
    model,
    samples,
)
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, TrainerCallback

import onward
from onward.fitting import FitResult
from onward.fitting.fit_state import FitState


class Counting(TrainerCallback):
    """Counts updates by steps of its own, and says its state as transformers' callbacks do."""

    def __init__(self, step: int = 1) -> None:
        self.step, self.count = step, 0

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.count += self.step

    def state(self) -> dict[str, Any]:
        return {"args": {"step": self.step}, "attributes": {"count": self.count}}


@pytest.mark.parametrize("strategy", ["epoch", "steps"])
def test_a_finished_run_goes_on_with_more_epochs(strategy: str, tmp_path: Path) -> None:
    """The end of its last epoch, with an evaluation, is not done again."""
    options: dict[str, Any] = {
        "eval_strategy": "epoch", "logging_strategy": "epoch", "save_strategy": strategy,
        "save_steps": 3, "metric_for_best_model": "accuracy", "save_total_limit": 1,
    }  # fmt: skip
    schedules: list[Any] = []
    stops = [EarlyStoppingCallback(9, early_stopping_threshold=9.0) for _ in range(3)]

    def plateau(optimizer: Any) -> Any:
        schedules.append(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", 0.5, 0, 9.0))
        return schedules[-1]

    def run(folder: str, stop: Any, **more: Any) -> FitResult:
        given = {**options, **more, "load_best_model_at_end": False}
        return fitted(tmp_path / folder, [stop], scheduled=plateau, **given)

    whole = run("whole", stops[0], num_train_epochs=2)
    run("parts", stops[1], num_train_epochs=1)
    parts = run("parts", stops[2], num_train_epochs=2, resume_from_checkpoint=True)
    evaluated = [[e["step"] for e in r.log_history if "eval_loss" in e] for r in (whole, parts)]
    assert evaluated == [[6, 12], [6, 12]]
    assert schedules[2].state_dict() == schedules[0].state_dict()
    assert stops[2].early_stopping_patience_counter == stops[0].early_stopping_patience_counter


@pytest.mark.parametrize(("first", "then"), [(2, 4), (4, 2), (3, 4)])
def test_a_run_goes_on_with_batches_of_another_size(first: int, then: int, tmp_path: Path) -> None:
    """An epoch ends where its samples do, at the whole number that `epoch` counts to."""
    done = 4 if first == 2 else 3

    def stop(name: str, state: Any, control: Any) -> None:
        if name == "on_step_end" and state.global_step == done:
            control.should_save = control.should_training_stop = True

    fitted(tmp_path, [Recorder(stop)], first, num_train_epochs=1)
    recorder = Recorder()
    left = math.ceil((TRAIN - done * first) / then)
    fitted(tmp_path, [recorder], then, max_steps=done + left, resume_from_checkpoint=True)
    ends = [e for e in recorder.seen if e[0] == "on_epoch_end"]
    assert ends == [("on_epoch_end", done + left, 1.0)]
    epochs = [e[2] for e in recorder.seen if e[0] == "on_step_end"]
    assert epochs == sorted(epochs) and len(epochs) == left
    assert epochs[0] >= done * first / TRAIN


def test_batches_of_another_size_need_a_position_in_samples(tmp_path: Path) -> None:
    class Counts:
        """A loader whose position is in batches."""

        def __init__(self, size: int) -> None:
            self.batches, self.place = list(DataLoader(DATA, size, collate_fn=collate)), 0  # type: ignore[arg-type]

        def __len__(self) -> int:
            return len(self.batches)

        def __iter__(self) -> Any:
            for place in range(self.place, len(self)):
                self.place = place + 1
                yield self.batches[place]
            self.place = 0

        def state_dict(self) -> dict[str, Any]:
            return {"place": self.place}

        def load_state_dict(self, state: Any) -> None:
            self.place = state["place"]

    def run(size: int, resume: bool) -> FitResult:
        trainer = onward.Trainer(model(), onward.optim.SGD(lr=0.1))
        options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3}
        options |= {"output_dir": str(tmp_path), "resume_from_checkpoint": resume}
        return onward.fit(trainer, Counts(size), options=options)

    run(4, False)
    assert run(4, True).global_step == 3
    with pytest.raises(onward.OnwardError, match=r"an epoch of 6 batches, but .* has 11 .*fix: "):
        run(2, True)


def test_a_window_that_was_left_open_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    """A run begins with a window of its own, as transformers' does by `zero_grad`."""

    def stop(name: str, state: Any, control: Any) -> None:
        if name == "on_substep_end":
            control.should_training_stop = True

    def made() -> onward.Trainer:
        options = {"gradient_accumulation_steps": 2}
        return onward.Trainer(net := model(), torch.optim.SGD(net.parameters(), lr=0.5),
                              options=options)  # fmt: skip

    begun, fresh = made(), made()
    fitted(None, [Recorder(stop)], trainer=begun, num_train_epochs=1)
    assert begun.micro_steps == 1
    recorders = Recorder(), Recorder()
    for trainer, recorder in zip((begun, fresh), recorders, strict=True):
        fitted(None, [recorder], trainer=trainer, num_train_epochs=1)
    assert recorders[0].seen == recorders[1].seen
    for a, b in zip(begun.model.parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert [r.message for r in caplog.records if "accumulation window" in r.message] != []
    assert not fresh.zero_grad()


@pytest.mark.parametrize("left", [True, False])
def test_the_best_checkpoint_is_found_where_the_run_has_moved(
    left: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first evaluation is the best one; where its checkpoint is gone a line says so."""
    told = iter((9.0, 2.0, 1.0, 1.0, 1.0))

    class Says(TrainerCallback):
        def on_evaluate(self, *_: Any, metrics: Any, **__: Any) -> None:
            metrics["eval_accuracy"] = next(told)

    options: dict[str, Any] = {
        "eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "accuracy",
        "load_best_model_at_end": True, "save_total_limit": 1,
    }  # fmt: skip
    first = fitted(tmp_path / "a", [Says()], num_train_epochs=2, **options)
    assert first.best_model_checkpoint == str(tmp_path / "a" / "checkpoint-6")
    (tmp_path / "a").rename(tmp_path / "b")
    best = tmp_path / "b" / "checkpoint-6"
    if not left:
        shutil.rmtree(best)
    trainer = onward.Trainer(net := model(), torch.optim.SGD(net.parameters(), lr=0.5))
    options |= {"resume_from_checkpoint": True, "num_train_epochs": 3}
    found = fitted(tmp_path / "b", [Says()], trainer=trainer, **options)
    assert found.best_model_checkpoint == (str(best) if left else None)
    assert best.exists() == left
    assert any("is gone" in r.message for r in caplog.records) != left
    if left:
        wanted = safetensors.torch.load_file(best / "model.safetensors")
        assert all(torch.equal(wanted[n], p) for n, p in net.named_parameters())


def test_the_best_checkpoint_may_go_while_a_run_trains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def remove(name: str, state: Any, control: Any) -> None:
        if name == "on_epoch_end":
            control.should_save = False
        if name == "on_save":
            shutil.rmtree(tmp_path / f"checkpoint-{state.global_step}")

    options: dict[str, Any] = {"eval_strategy": "epoch", "save_strategy": "epoch"}
    options |= {"load_best_model_at_end": True, "num_train_epochs": 1}
    found = fitted(tmp_path, [Recorder(remove)], **options)
    assert found.global_step == 6
    assert [r.message for r in caplog.records if "the model keeps its last weights" in r.message]


def test_callbacks_of_one_class_have_each_their_state(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 4}
    fitted(tmp_path, [Counting(1), EarlyStoppingCallback(3), Counting(100)],
           eval_strategy="epoch", load_best_model_at_end=True, **options)  # fmt: skip
    resumed = [Counting(1), EarlyStoppingCallback(3), Counting(100)]
    options |= {"resume_from_checkpoint": True, "eval_strategy": "epoch"}
    fitted(tmp_path, resumed, load_best_model_at_end=True, **options)
    assert [c.count for c in resumed if isinstance(c, Counting)] == [4, 400]


def test_a_state_of_an_older_file_is_read() -> None:
    """Older files have one state for a class, and sums since the run's begin."""
    trainer = onward.Trainer(model(), onward.optim.SGD(lr=0.1))
    callbacks = [Counting(), Counting()]
    state = FitState(onward.FitOptions(), 4, callbacks, trainer, None)
    held = state.state_dict()
    old = {k: held[k] for k in ("now", "micro", "epochs")} | {"total_loss": 7.0, "since": [2, 4.0]}
    old["now"] = {**held["now"], "global_step": 4}
    old["callbacks"] = {"Counting": {"args": {}, "attributes": {"count": 5}}}
    state.load_state_dict(old)
    assert [c.count for c in callbacks] == [5, 5]
    assert (state.unlogged, state.mean_loss()) == (2, 1.5)
    state.load_state_dict(old | {"total_loss": math.nan})
    assert math.isnan(state.mean_loss()) and not state.unlogged
    state.updated(0.5, 4)
    assert state.mean_loss() == 0.5


# ---- losses that are not finite


class Rising(Classifier):
    """A classifier whose loss, but not its gradient, is infinite where a sample asks for it."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        found = super().forward(x, labels)
        high = torch.where((x > 50).any(), torch.inf, 0.0)
        return found | {"loss": found["loss"] + high}


@pytest.mark.parametrize("row", [9, 13])  # in the first, or second, of the updates of a log
def test_infinite_losses_are_logged_as_transformers_does(
    row: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = samples(TRAIN, 0)
    rows[row]["x"][0] = 60.0
    monkeypatch.setattr(fit_runs, "DATA", rows)
    options = {"logging_steps": 2, "num_train_epochs": 2, "save_strategy": "no"}
    torch.manual_seed(3)
    theirs, ours = Rising(), Rising()
    ours.load_state_dict(theirs.state_dict())
    given = by_transformers(
        theirs, 1, tmp_path / "theirs", [], **options, lr_scheduler_type="constant"
    )
    found = by_onward(ours, 1, tmp_path / "ours", [], **options)
    logged = [[e["loss"] for e in r if "loss" in e]
              for r in (found.log_history, given.state.log_history)]  # fmt: skip
    assert len(logged[0]) == 6
    assert logged[0] == pytest.approx(logged[1], rel=1e-4)
    assert found.training_loss == pytest.approx(given.state.log_history[-1]["train_loss"], rel=1e-4)


@pytest.mark.parametrize("filtered", [True, False])
def test_a_loss_of_nan_spoils_no_later_log(filtered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = samples(TRAIN, 0)
    rows[5]["x"][:] = torch.nan
    monkeypatch.setattr(fit_runs, "DATA", rows)
    options = {"logging_steps": 2, "num_train_epochs": 1, "logging_nan_inf_filter": filtered}
    found = fitted(**options)
    finite = [math.isfinite(e["loss"]) for e in found.log_history if "loss" in e]
    assert finite == [filtered, True, True]
    assert math.isfinite(found.training_loss) == filtered
