"""Train GPT-2 on several processes of one machine, each with its own share of every batch.

torchrun --nproc-per-node=2 data_parallel.py

With a folder, it saves there, and goes on from the newest checkpoint when it is started again:

torchrun --nproc-per-node=2 --max-restarts=3 data_parallel.py FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import distributed
from transformers import GPT2Config, GPT2LMHeadModel

import onward

SEQUENCES, TOKENS, STEPS = 8, 64, 30
# bytes to predict: every rank has the same text, and takes other lines of it
TEXT = b"the ranks of a mesh train one model, and each has its own share of every batch; " * 64


def main(folder: Path | None = None) -> list[float]:
    """Trains on this process's share of each batch; the losses of the whole batches. folder: of
    checkpoints."""
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    torch.manual_seed(0)  # every rank starts from the same weights
    config = GPT2Config(
        vocab_size=256, n_positions=TOKENS, n_embd=64, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, use_cache=False,
    )  # fmt: skip
    trainer = onward.Trainer(
        GPT2LMHeadModel(config),
        onward.optim.AdamW(lr=3e-3),
        options={"mesh": {"dp_replicate": ranks}, "max_grad_norm": 1.0},
    )
    text, losses = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long(), []
    if folder is not None and any(folder.glob("checkpoint-*")):
        trainer.resume(folder)
    for step in range(trainer.updates, STEPS):
        starts = (torch.arange(SEQUENCES) * 37 + step * 11) % (len(text) - TOKENS)
        share = starts[rank::ranks].tolist()
        batch = torch.stack([text[start : start + TOKENS] for start in share])  # i64[N,TOKENS]
        losses.append(float(trainer.train_step(input_ids=batch, labels=batch).loss))
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {losses[-1]:.3f} over the sequences of {ranks} ranks")
        if folder is not None and trainer.updates % 10 == 0:
            trainer.save(folder, save_total_limit=2)
    distributed.destroy_process_group()
    return losses


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
