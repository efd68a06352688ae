"""One rank of runs of DeepSpeed's ZeRO on CPUs over Gloo; `run` starts two, gives their results.

The engine is made of an eager model, an accelerated one, or an onward.Module.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

RANKS, STEPS, ROWS = 2, 4, 4  # rows of a rank's batch
RUNS = [("eager", 1), ("eager", 2), ("accelerate", 1), ("accelerate", 2), ("Module", 2)]  # stage


def run(folder: Path) -> dict[tuple[str, int, int], dict[str, torch.Tensor]]:
    """By kind, stage and rank: losses f32[STEPS], and the weights at the end by name."""
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder), str(rank)],
            env={**os.environ, "DS_ACCELERATOR": "cpu", "RANK": str(rank), "LOCAL_RANK": str(rank),
                 "WORLD_SIZE": str(RANKS)},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    told = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert not any(rank.returncode for rank in ranks), "\n".join(told)
    return {
        (kind, stage, rank): load_file(folder / f"{kind}-{stage}-{rank}.safetensors")
        for kind, stage in RUNS
        for rank in range(RANKS)
    }


def train(kind: str, stage: int, folder: Path, rank: int) -> None:
    deepspeed: Any = importlib.import_module("deepspeed")
    from hf_runs import causal_lm
    from texts import language_rows

    import onward
    from onward.module import accelerated

    plain: Any = causal_lm()
    model: Any = plain
    if kind == "accelerate":
        onward.accelerate(plain, strict=True)
    elif kind == "Module":
        model = onward.Module(plain, strict=True)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.5,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    rows, losses = language_rows(RANKS * ROWS * STEPS, unlabelled=6), []
    for step in range(STEPS):
        start = ROWS * (RANKS * step + rank)
        mine = rows[start : start + ROWS]
        batch = {k: torch.stack([r[k] for r in mine]) for k in ("input_ids", "labels")}
        loss = engine(**batch, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    if kind != "eager":
        held = accelerated(plain)
        assert held is not None and held.plan.launches, "it has run as a graph"
    weights = {name: p.detach().clone() for name, p in plain.named_parameters()}
    save_file(
        {"losses": torch.stack(losses), **weights}, folder / f"{kind}-{stage}-{rank}.safetensors"
    )


def main(folder: Path, rank: int) -> None:
    deepspeed: Any = importlib.import_module("deepspeed")
    from torch import distributed

    torch.set_num_threads(1)
    place = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=RANKS)
    # a faster all-reduce of one machine's ranks, which would be compiled first
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None  # type: ignore
    deepspeed.init_distributed("gloo", dist_init_required=False)
    for kind, stage in RUNS:
        train(kind, stage, folder, rank)
    distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
