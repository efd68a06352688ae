"""Train GPT-2 on any mesh of processes of one machine, then once more on one process, and compare.

torchrun --nproc-per-node=2 any_mesh.py tp=2
torchrun --nproc-per-node=4 any_mesh.py dp_shard=2,tp=2
torchrun --nproc-per-node=2 any_mesh.py dp_shard=2 zero=3
torchrun --nproc-per-node=2 any_mesh.py pp=2 pipeline_schedule=GPipe

The first word is the mesh, axes of data first; others are options of onward.TrainerOptions.
"""

from __future__ import annotations

import math
import os
import sys
from typing import Any

import torch
from torch import distributed
from transformers import GPT2Config, GPT2LMHeadModel

import onward

SEQUENCES, TOKENS, STEPS = 8, 64, 20
TEXT = (
    b"ranks of a mesh share the samples, the weights, the positions or the layers of a model; " * 64
)
AXES_OF_DATA = ("dp_replicate", "dp_shard")  # ranks along others are given one batch


def trainer_of(**options: Any) -> onward.Trainer:
    """A GPT-2 with dropout, the same one for the same options."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=TOKENS, n_embd=64, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=0, use_cache=False,
    )  # fmt: skip
    return onward.Trainer(
        GPT2LMHeadModel(config),
        onward.optim.AdamW(lr=3e-3),
        options={"max_grad_norm": 1.0, "seed": 1, **options},
    )


def batch_of(step: int, share: int, shares: int) -> torch.Tensor:
    """A share of the sequences of a step, i64[N,TOKENS]: consecutive ones, so that the shares of
    all ranks make the batch of one process."""
    text = torch.frombuffer(bytearray(TEXT), dtype=torch.uint8).long()
    starts = (torch.arange(SEQUENCES) * 37 + step * 11) % (len(text) - TOKENS)
    mine = starts.chunk(shares)[share].tolist()
    return torch.stack([text[start : start + TOKENS] for start in mine])


def read(word: str) -> tuple[str, Any]:
    """The name and the value of `name=value`: a number, True, or a text."""
    name, _, text = word.partition("=")
    return name, int(text) if text.isdigit() else text == "True" or text


def main(words: list[str]) -> float:
    """Trains on the mesh; returns the largest difference of a loss from that of one process,
    relative to it. words: those behind the program's name."""
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    first, *others = words or [f"dp_replicate={ranks}"]
    mesh: dict[str, int] = dict(map(read, first.split(",")))
    options = dict(map(read, others))
    shares = math.prod(mesh.get(axis, 1) for axis in AXES_OF_DATA)
    trainer, losses = trainer_of(mesh=mesh, **options), []
    for step in range(STEPS):
        batch = batch_of(step, rank * shares // ranks, shares)
        losses.append(float(trainer.train_step(input_ids=batch, labels=batch).loss))
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1}: loss {losses[-1]:.4f} on {mesh}")
    largest = 0.0
    if rank == 0:
        alone, loss = trainer_of(), math.nan
        for step in range(STEPS):
            batch = batch_of(step, 0, 1)
            loss = float(alone.train_step(input_ids=batch, labels=batch).loss)
            largest = max(largest, abs(losses[step] - loss) / loss)
        print(f"on one process: loss {loss:.4f}; the losses differ by {largest:.0e} at most")
    distributed.barrier()
    distributed.destroy_process_group()
    return largest


if __name__ == "__main__":
    main(sys.argv[1:])
