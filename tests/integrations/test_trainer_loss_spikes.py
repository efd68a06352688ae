"""`loss_spikes` in transformers' loop: an update that is left out is as if its batches had never
come.

The oracle is transformers' own Trainer on the same data without the odd batches.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_runs import CLOSE, arguments, assert_same_weights
from torch import nn

import onward
from onward.errors import OnwardError
from onward.integrations.led_trainer import LedTrainer
from onward.integrations.transformers import Trainer

F = nn.functional
NEAR: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-6}  # after some 80 steps of SGD
SIZE = 4  # samples of a micro-batch
UPDATES = 40  # of an epoch
ODD = 36  # the update of each epoch whose rows are wrong


class Net(nn.Module):
    """x f32[N,8] and labels i64[N] to logits f32[N,4] and the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Summed(Net):
    """A model that divides the sum of its losses by the labels of the whole window."""

    accepts_loss_kwargs = True

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None
    ) -> dict[str, torch.Tensor]:
        logits = self.layers(x)
        if num_items_in_batch is None:
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}
        total = F.cross_entropy(logits, labels, reduction="sum")
        return {"loss": total / num_items_in_batch, "logits": logits}


class InOrder(Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # pyright: ignore


class StockInOrder(transformers.Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)  # pyright: ignore


def rows(window: int, last: int, odd: tuple[int, ...] = (), left_out: bool = False) -> list[Any]:
    """An epoch: UPDATES windows, of `last` micro-batches the last. The rows of those in `odd` are
    large and their labels wrong, or they are left out; every fifth label counts for nothing."""
    draws = torch.Generator().manual_seed(1)
    found = []
    for update in range(UPDATES):
        for i in range(SIZE * (last if update == UPDATES - 1 else window)):
            x = torch.randn(8, generator=draws)
            y = int(x[:4].argmax())
            if update in odd:
                x, y = 50.0 * x, (y + 1) % 4
                if left_out:
                    continue
            found.append({"x": x, "labels": torch.tensor(-100 if i % 5 == 4 else y)})
    return found


def trainer_of(
    kind: Any, folder: Path, data: list[Any], net: type[Net] = Net, window: int = 1, **changes: Any
) -> Any:
    named = {k: changes.pop(k) for k in ("options",) if k in changes}
    plain: dict[str, Any] = {
        "per_device_train_batch_size": SIZE, "gradient_accumulation_steps": window,
        "learning_rate": 0.1, "optim": "sgd", "max_steps": -1, "num_train_epochs": 2,
        "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 50,
    }  # fmt: skip
    args = arguments(folder, **{**plain, **changes})
    return kind(net(), args, train_dataset=data, **named)


def losses(trainer: Any) -> list[float]:
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize(
    ("net", "window", "last"),
    [(Net, 1, 1), (Net, 3, 1), (Summed, 3, 1)],
    ids=["one", "mean of three", "sum of three"],
)
def test_a_skipped_update_is_as_if_its_batches_had_never_come(
    net: type[Net], window: int, last: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The last window of an epoch has fewer micro-batches, which is no spike."""
    ours = trainer_of(
        InOrder, tmp_path, rows(window, last, (ODD,)), net, window, options={"loss_spikes": "skip"}
    )
    with caplog.at_level(logging.WARNING, logger="onward"):
        ours.train()
    stock = trainer_of(
        StockInOrder, tmp_path, rows(window, last, (ODD,), left_out=True), net, window
    )
    stock.train()
    assert sum("is skipped: its loss" in r.message for r in caplog.records) == 2, caplog.text
    assert_same_weights(ours.model, stock.model, **NEAR)
    assert (ours.state.global_step, stock.state.global_step) == (2 * UPDATES, 2 * UPDATES - 2)
    assert ours.onward_trainer.updates == 2 * UPDATES - 2
    assert ours.lr_scheduler.state_dict()["last_epoch"] == 2 * UPDATES - 2
    left = [x for i, x in enumerate(losses(ours)) if i % UPDATES != ODD]
    torch.testing.assert_close(
        torch.tensor(left), torch.tensor(losses(stock)), rtol=1e-3, atol=2e-4
    )
    held = torch.tensor(ours.onward_trainer.loss_history)  # as transformers logs a window's loss
    torch.testing.assert_close(held, torch.tensor(losses(stock)[-64:]), rtol=1e-3, atol=2e-4)


def test_a_warning_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = rows(1, 1, (ODD,))
    ours = trainer_of(InOrder, tmp_path, data, options={"loss_spikes": "warn"}, num_train_epochs=1)
    with caplog.at_level(logging.WARNING, logger="onward"):
        ours.train()
    stock = trainer_of(StockInOrder, tmp_path, data, num_train_epochs=1)
    stock.train()
    assert sum(r.message.startswith("its loss") for r in caplog.records) == 1, caplog.text
    assert_same_weights(ours.model, stock.model, **NEAR)


def test_an_error_names_the_checkpoint_and_leaves_the_weights_before_it(tmp_path: Path) -> None:
    data = rows(1, 1, (ODD,))
    ours = trainer_of(
        InOrder, tmp_path, data, options={"loss_spikes": "raise"},
        save_strategy="steps", save_steps=35,
    )  # fmt: skip
    with pytest.raises(onward.LossSpikeError, match=f"update {ODD + 1} is not made") as raised:
        ours.train()
    path = tmp_path / "checkpoint-35"
    assert f"trainer.train(resume_from_checkpoint='{path}')" in str(raised.value)
    stock = trainer_of(StockInOrder, tmp_path / "stock", data, max_steps=ODD)
    stock.train()
    assert_same_weights(ours.model, stock.model, **NEAR)


def test_too_many_skips_in_a_row_end_the_run(tmp_path: Path) -> None:
    data = rows(1, 1, tuple(range(34, UPDATES)))
    options = {"loss_spikes": "skip", "max_skipped_updates": 3}
    ours = trainer_of(InOrder, tmp_path, data, options=options)
    with pytest.raises(onward.LossSpikeError, match="3 updates in a row were skipped"):
        ours.train()
    assert ours.state.global_step == 36, "of the third, the loop has not heard"
    stock = trainer_of(StockInOrder, tmp_path, data, max_steps=34)
    stock.train()
    assert_same_weights(ours.model, stock.model, **NEAR)


def test_a_resumed_run_skips_what_the_whole_run_skips(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, options = rows(1, 1, (ODD,)), {"loss_spikes": "skip"}
    saving: dict[str, Any] = {
        "save_strategy": "steps", "save_steps": 35, "num_train_epochs": 1, "optim": "adamw_torch",
        "learning_rate": 0.02,
    }  # fmt: skip
    whole = trainer_of(InOrder, tmp_path, data, options=options, **saving)
    whole.train()
    path = tmp_path / "checkpoint-35"
    resumed = trainer_of(InOrder, tmp_path / "resumed", data, options=options, **saving)
    resumed.train(resume_from_checkpoint=str(path))
    assert resumed.onward_trainer.loss_history == whole.onward_trainer.loss_history
    assert resumed.onward_trainer.updates == UPDATES - 1, "one is left out"
    assert_same_weights(resumed.model, whole.model, rtol=0.0, atol=0.0)
    stock = trainer_of(StockInOrder, tmp_path / "stock", data, **saving)
    stock.train(resume_from_checkpoint=str(path))  # the file is nothing to it
    assert stock.state.global_step == UPDATES

    for text in ("", "[", '{"losses": [1.0, "2"]}', json.dumps({"other": []}), None):
        file = path / "loss_history.json"
        file.unlink() if text is None else file.write_text(text)
        caplog.clear()
        blind = trainer_of(InOrder, tmp_path / "blind", data, options=options, **saving)
        with caplog.at_level(logging.WARNING, logger="onward"):
            blind.train(resume_from_checkpoint=str(path))
        assert "loss_spikes begins with no losses known" in caplog.text
        assert blind.onward_trainer.updates == UPDATES


def test_where_transformers_makes_the_update_it_is_refused(tmp_path: Path) -> None:
    class OwnLoss(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs)

    for value in ("warn", "skip", "raise"):
        with pytest.raises(OnwardError, match="options=loss_spikes would have no effect"):
            trainer_of(OwnLoss, tmp_path, rows(1, 1), options={"loss_spikes": value})


def test_a_window_that_another_loop_takes_over_is_no_part_of_the_next_loss() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.0)
    options = {"gradient_accumulation_steps": 2}
    trainer = LedTrainer(net, optimizer, lambda out: out["loss"], options=options)
    trainer.takes_target = False
    batch = {"x": torch.randn(4, 8), "labels": torch.tensor([0, 1, 2, 3])}
    other = {"x": torch.randn(4, 8), "labels": torch.tensor([1, 1, 0, 2])}
    trainer.step_led(batch, 0.25, last=False)
    trainer.give_back()
    trainer.step_led(batch, 0.25, last=False)
    result = trainer.step_led(other, 0.75, last=True)
    with torch.no_grad():
        want = 0.25 * net(**batch)["loss"] + 0.75 * net(**other)["loss"]
    torch.testing.assert_close(result.window_loss, want, **CLOSE)
