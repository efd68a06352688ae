"""One rank of runs of DistributedDataParallel over Gloo; `run` starts two and gives their results.

The model is eager, accelerated within DDP, or an onward.Module within DDP.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file

RANKS, STEPS, ROWS = 2, 3, 4  # rows of a rank's batch
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static graph": {"static_graph": True},
    "unused parameters": {"find_unused_parameters": True},
    "views of buckets": {"gradient_as_bucket_view": True},
}


KINDS = {"eager": tuple(OPTIONS), "accelerate": tuple(OPTIONS), "Module": ("plain",)}


def run(folder: Path) -> dict[tuple[str, str, int], dict[str, torch.Tensor]]:
    """By kind, options and rank: losses f32[STEPS], and the weights at the end by name."""
    run_ranks(__file__, [str(folder)], RANKS)
    return {
        (kind, options, rank): load_file(folder / f"{kind}-{options}-{rank}.safetensors")
        for kind, names in KINDS.items()
        for options in names
        for rank in range(RANKS)
    }


def train(kind: str, options: str, folder: Path, rank: int) -> None:
    from hf_runs import causal_lm
    from texts import language_rows
    from torch.nn.parallel import DistributedDataParallel

    import onward
    from onward.module import accelerated

    plain: Any = causal_lm()
    model: Any = plain
    if kind == "accelerate":
        onward.accelerate(plain, strict=True)
    elif kind == "Module":
        model = onward.Module(plain, strict=True)
    wrapped = DistributedDataParallel(model, **OPTIONS[options])
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    rows, losses = language_rows(2 * RANKS * ROWS * STEPS, unlabelled=6), []
    for step in range(STEPS):
        start = ROWS * (RANKS * step + rank)
        batch = {
            k: torch.stack([r[k] for r in rows[start : start + ROWS]])
            for k in ("input_ids", "labels")
        }
        if step == 1 and options != "static graph":
            with wrapped.no_sync():
                wrapped(**batch, use_cache=False).loss.backward()
        loss = wrapped(**batch, use_cache=False).loss
        loss.backward()
        losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(wrapped.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    if kind != "eager":
        held = accelerated(plain)
        assert held is not None and held.plan.launches, "it has run as a graph"
    weights = {name: p.detach().clone() for name, p in plain.named_parameters()}
    save_file(
        {"losses": torch.stack(losses), **weights}, folder / f"{kind}-{options}-{rank}.safetensors"
    )


def main(folder: Path, rank: int) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    place = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
    for kind, names in KINDS.items():
        for options in names:
            train(kind, options, folder, rank)
    distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
