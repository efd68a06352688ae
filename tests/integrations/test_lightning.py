"""Lightning: a LightningModule whose inner model is accelerated, as with the eager model."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_runs import CLOSE, assert_same_weights, causal_lm
from texts import language_rows

import onward
from onward.module import accelerated

pl = pytest.importorskip("pytorch_lightning", exc_type=ImportError)

pytestmark = [
    # Lightning's advice about workers, and its use of torch's pytree by a name of yesterday
    pytest.mark.filterwarnings("ignore:.*num_workers.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
]


@pytest.fixture(autouse=True)
def quiet_lightning() -> Iterator[None]:
    loggers = [logging.getLogger(n) for n in ("pytorch_lightning", "lightning_fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


class Language(pl.LightningModule):
    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__()
        self.net = net
        self.seen: list[float] = []

    def forward(self, **batch: torch.Tensor) -> Any:
        return self.net(**batch, use_cache=False)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = self(**batch).loss
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.seen.append(float(loss.detach()))
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        found = self(**batch)
        self.log("val_loss", found.loss)
        self.seen += [float(found.loss), float(found.logits.sum())]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3)]


class ByHand(Language):
    """Two losses of two forwards, with an optimizer that the module steps itself."""

    def __init__(self, net: torch.nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self(**batch).loss + 0.1 * self(input_ids=batch["labels"].clamp(min=0)).logits.var()
        self.manual_backward(loss)
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")
        optimizer.step()
        self.seen.append(float(loss.detach()))


def fit(module: Any, folder: Path, resume: str | None = None, **named: Any) -> Any:
    rows: Any = language_rows(32, unlabelled=6)
    loaders = [torch.utils.data.DataLoader(r, batch_size=4) for r in (rows[:24], rows[24:])]
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=str(folder), enable_checkpointing=False, **{"max_epochs": 2, **named},
    )  # fmt: skip
    trainer.fit(module, *loaders, ckpt_path=resume)
    return trainer


@pytest.mark.parametrize("kind", [Language, ByHand])
def test_fit(kind: Any, tmp_path: Path, captures: list[int]) -> None:
    named: dict[str, Any] = {}
    if kind is Language:
        named = {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}
    ours, eager = kind(onward.accelerate(causal_lm(), strict=True)), kind(causal_lm())
    for module in (ours, eager):
        fit(module, tmp_path, **named)
    torch.testing.assert_close(torch.tensor(ours.seen), torch.tensor(eager.seen), **CLOSE)
    assert_same_weights(ours.net, eager.net)
    held = accelerated(ours.net)
    assert held is not None and held.plan.launches
    assert len(captures) == (2 if kind is Language else 3)  # training, evaluation; no labels


def test_checkpoints_are_loaded(tmp_path: Path) -> None:
    whole = Language(onward.accelerate(causal_lm(), strict=True))
    trainer = fit(whole, tmp_path, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    trainer = fit(whole, tmp_path, resume=str(tmp_path / "one.ckpt"))
    resumed = Language(onward.accelerate(causal_lm(), strict=True))
    fit(resumed, tmp_path, resume=str(tmp_path / "one.ckpt"))
    assert trainer.global_step == 12
    assert_same_weights(resumed.net, whole.net)
    eager = Language(causal_lm())
    fit(eager, tmp_path)
    assert_same_weights(resumed.net, eager.net)
