"""Trains a small GPT-2 from random weights on the bytes of a text.

    python gpt2_from_text.py [file.txt]

Without a file it reads the source of Python's argparse. Prints the loss as it falls, and some text
of the trained model.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import onward

STEPS, BATCH, LENGTH = 120, 8, 64


def main(path: str | None = None) -> list[float]:
    """The losses, one per step."""
    torch.manual_seed(0)
    text = Path(path).read_bytes() if path else inspect.getsource(argparse).encode()
    data = torch.tensor(list(text))
    if len(data) <= LENGTH:
        raise SystemExit(f"{path} has {len(data)} bytes; fix: a text of more than {LENGTH}")

    config = GPT2Config(vocab_size=256, n_positions=LENGTH, n_layer=2, n_embd=128, n_head=4,
                        bos_token_id=0, eos_token_id=0)  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=STEPS)
    trainer = onward.Trainer(model, optimizer)

    losses: list[float] = []
    for step in range(STEPS):
        starts = torch.randint(0, len(data) - LENGTH, (BATCH,)).tolist()
        ids = torch.stack([data[start : start + LENGTH] for start in starts])  # i64[B,T]
        losses.append(float(trainer.train_step(input_ids=ids, labels=ids).loss))
        scheduler.step()
        if step % 20 == 0:
            print(f"step {step:4}  loss {losses[-1]:.3f}")

    # The trained weights are the model's own: everything that works on it goes on working.
    model.eval()
    written = model.generate(
        data[None, :16], max_new_tokens=LENGTH - 16, do_sample=True, pad_token_id=0
    )
    print(bytes(written[0].tolist()).decode(errors="replace"))
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:2])
