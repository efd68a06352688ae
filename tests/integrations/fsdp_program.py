"""One rank of runs of torch's FSDP2 (`fully_shard`) over Gloo; `run` starts two and gives their
results.

The model is eager, accelerated before or behind `fully_shard`, or an onward.Module. It is sharded
as a whole, each block by itself too, or two blocks together. Steps have dropout off, clipping, a
micro-batch whose gradients wait, two forwards before a backward, one without a backward, and an
evaluation.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from rank_processes import run_ranks
from safetensors.torch import load_file, save_file

RANKS, STEPS, ROWS = 2, 4, 2  # rows of a rank's micro-batch
SHARDED = ("whole", "blocks", "two blocks", "blocks that stay whole")
KINDS: dict[str, tuple[str, ...]] = {
    "eager": (*SHARDED, "autocast"),
    "accelerate": (*SHARDED, "autocast"),
    "accelerate behind": ("blocks",),
    "Module": ("whole", "blocks"),
}
REFUSED = {  # by the way of sharding: what a strict call says
    "blocks alone": "has parameters in shards, and the model has not",
    "mixed precision": "casts its parameters by a MixedPrecisionPolicy",
}


def run(folder: Path) -> dict[tuple[str, str, int], dict[str, torch.Tensor]]:
    """By kind, way of sharding and rank: losses, norms, and the weights at the end by name."""
    run_ranks(__file__, [str(folder)], RANKS)
    return {
        (kind, way, rank): load_file(folder / f"{kind}-{way}-{rank}.safetensors")
        for kind, ways in KINDS.items()
        for way in ways
        for rank in range(RANKS)
    }


def shard(model: Any, way: str) -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    blocks = list(model.transformer.h)
    if way == "two blocks":
        fully_shard(blocks)
    elif way == "mixed precision":
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    elif way != "whole":
        for block in blocks:
            fully_shard(block, reshard_after_forward=way != "blocks that stay whole")
    if way not in ("blocks alone", "mixed precision"):
        fully_shard(model)


def made(kind: str, way: str, strict: bool = True) -> Any:
    """A model of one kind, sharded in one way."""
    from hf_runs import causal_lm

    import onward

    model: Any = causal_lm()
    if kind == "accelerate":
        onward.accelerate(model, strict=strict)
    elif kind == "Module":
        model = onward.Module(model, strict=strict)
    shard(model, way)
    if kind == "accelerate behind":
        onward.accelerate(model, strict=strict)
    return model.train()


def batches(rank: int) -> list[dict[str, torch.Tensor]]:
    """Two micro-batches of each step."""
    from texts import language_rows

    rows = language_rows(2 * RANKS * ROWS * STEPS, unlabelled=6)
    starts = range(rank * ROWS, len(rows), RANKS * ROWS)
    return [
        {k: torch.stack([r[k] for r in rows[at : at + ROWS]]) for k in ("input_ids", "labels")}
        for at in starts
    ]


def train(kind: str, way: str, folder: Path, rank: int) -> None:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    from onward.module import accelerated

    model = made(kind, way)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dtype = torch.bfloat16 if way == "autocast" else None
    numbers: list[torch.Tensor] = []

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(**batch, use_cache=False).loss
        numbers.append(loss.detach().float())
        return loss

    given = batches(rank)
    for step in range(STEPS):
        one, two = given[2 * step : 2 * step + 2]
        if step == 1:  # the gradients of the first wait for those of the second
            model.set_requires_gradient_sync(False)
            loss_of(one).backward()
            model.set_requires_gradient_sync(True)
            loss_of(two).backward()
        elif step == 2:
            (loss_of(one) + loss_of(two)).backward()
        else:
            if step == 3:
                loss_of(two)  # no backward follows
            loss_of(one).backward()
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        numbers.append(norm.full_tensor().detach())
        optimizer.step()
        optimizer.zero_grad()
        with torch.inference_mode() if step % 2 else torch.no_grad():
            model.eval()
            loss_of(two)
            model.train()
        if way in ("blocks", "two blocks"):
            assert isinstance(model.transformer.h[0].mlp.c_fc.weight, DTensor), "it is freed"
    if kind != "eager":
        held = accelerated(getattr(model, "module", model))
        assert held is not None and held.plan.launches, "it has run as a graph"
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # of the model itself FSDP keeps it from forward to backward
    weights = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}
    path = folder / f"{kind}-{way}-{rank}.safetensors"
    save_file({"numbers": torch.stack(numbers), **weights}, path)


def refused(way: str, rank: int) -> None:
    """A strict call says why, and any other runs in eager PyTorch."""
    from onward import CaptureError, EagerWarning

    batch = batches(rank)[0]
    try:
        made("accelerate", way)(**batch, use_cache=False)
    except CaptureError as error:
        assert REFUSED[way] in str(error) and "; fix: " in str(error), error
    else:
        raise AssertionError(f"{way} was not refused")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = made("accelerate", way, strict=False)(**batch, use_cache=False).loss
    assert [w for w in caught if issubclass(w.category, EagerWarning)], caught
    assert torch.equal(found, made("eager", way)(**batch, use_cache=False).loss)


def main(folder: Path, rank: int) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    place = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
    for kind, ways in KINDS.items():
        for way in ways:
            train(kind, way, folder, rank)
    for way in REFUSED:
        refused(way, rank)
    distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
