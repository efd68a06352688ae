"""Trains a small GPT-2 with transformers' Trainer, whose step Onward runs as one graph.

    python huggingface_trainer.py [folder]

One import line differs from a script of transformers' own. Evaluation, logs, the schedule,
clipping, accumulation and checkpoints are transformers'; the second Trainer goes on from a
checkpoint.
"""

from __future__ import annotations

import inspect
import sys
import tempfile
import textwrap

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from onward.integrations.transformers import Trainer  # instead of: from transformers import Trainer

LENGTH = 64


def blocks() -> list[dict[str, torch.Tensor]]:
    """Bytes of a module of Python's own: input_ids and labels, i64[LENGTH] each."""
    data = torch.tensor(list(inspect.getsource(textwrap).encode()))
    return [{"input_ids": ids, "labels": ids} for ids in data.split(LENGTH)[:-1]]


def model() -> GPT2LMHeadModel:
    config = GPT2Config(vocab_size=256, n_layer=2, n_embd=64, n_head=4, bos_token_id=0,
                        eos_token_id=0)  # fmt: skip
    return GPT2LMHeadModel(config)


def main(folder: str) -> tuple[float, float]:
    """The evaluation loss before and after."""
    torch.manual_seed(0)
    rows = blocks()
    args = TrainingArguments(
        output_dir=folder, use_cpu=True, max_steps=40, per_device_train_batch_size=8,
        gradient_accumulation_steps=2, learning_rate=5e-3, lr_scheduler_type="cosine",
        warmup_steps=4, max_grad_norm=1.0, logging_steps=10, save_steps=20, report_to="none",
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = Trainer(model(), args, train_dataset=rows[:-16], eval_dataset=rows[-16:])
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    print(f"held out: loss {before:.3f} -> {after:.3f}")
    print(trainer.onward_trainer.report())

    resumed = Trainer(model(), args, train_dataset=rows[:-16], eval_dataset=rows[-16:])
    resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-20")
    again = resumed.evaluate()["eval_loss"]
    print(f"the same from checkpoint-20: {again:.3f}")
    assert abs(again - after) < 1e-4
    return before, after


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        main(sys.argv[1] if len(sys.argv) > 1 else made)
