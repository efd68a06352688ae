"""Trains a LightningModule whose inner model Onward runs.

    python lightning_module.py

The loop, clipping, accumulation and validation are Lightning's; one line is Onward's.
"""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import onward


class Language(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(vocab_size=256, n_layer=2, n_embd=64, n_head=4, bos_token_id=0,
                            eos_token_id=0)  # fmt: skip
        self.net = onward.accelerate(GPT2LMHeadModel(config))

    def training_step(self, ids: torch.Tensor, index: int) -> Any:
        return self.net(input_ids=ids, labels=ids, use_cache=False).loss

    def validation_step(self, ids: torch.Tensor, index: int) -> None:
        self.log("held_out", self.net(input_ids=ids, labels=ids, use_cache=False).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> tuple[float, float]:
    """The held-out loss before and after."""
    pl.seed_everything(0)
    data = torch.tensor(list(inspect.getsource(inspect).encode()))
    rows: Any = list(data.split(64)[:256])
    train = torch.utils.data.DataLoader(rows[:-64], batch_size=8, shuffle=True)
    held_out = torch.utils.data.DataLoader(rows[-64:], batch_size=8)
    module = Language()
    trainer = pl.Trainer(
        accelerator="cpu", max_epochs=1, gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings():  # about workers of the data loaders
        warnings.filterwarnings("ignore", message=".*num_workers.*")
        before = trainer.validate(module, held_out)[0]["held_out"]
        trainer.fit(module, train, held_out)
        after = trainer.validate(module, held_out)[0]["held_out"]
    print(f"held out: loss {before:.3f} -> {after:.3f}")
    return before, after


if __name__ == "__main__":
    main()
