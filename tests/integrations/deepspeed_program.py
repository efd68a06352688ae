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
RUNS = [(kind, stage) for stage in (1, 2, 3) for kind in ("eager", "accelerate")]
RUNS += [("Module", 2), ("Module", 3)]


def run(folder: Path) -> dict[tuple[str, int, int], dict[str, torch.Tensor]]:
    """By kind, stage and rank: losses f32[2 * STEPS] of training and evaluation, and
    the weights at the end by name."""
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
        # by default all parameters of a model as small as this would stay whole
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20},
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
        require_shards(plain, kind, stage)
        engine.step()
        losses.append(loss.detach())
        with torch.no_grad():
            engine.eval()
            losses.append(engine(**batch, use_cache=False).loss)
            engine.train()
        require_shards(plain, kind, stage)
    if kind != "eager":
        held = accelerated(plain)
        assert held is not None and held.plan.launches, "it has run as a graph"
    with deepspeed.zero.GatheredParameters(list(plain.parameters()), enabled=stage == 3):
        weights = {name: p.detach().clone() for name, p in plain.named_parameters()}
    save_file(
        {"losses": torch.stack(losses), **weights}, folder / f"{kind}-{stage}-{rank}.safetensors"
    )


def require_shards(model: Any, kind: str, stage: int) -> None:
    """With stage 3 a rank holds its parts of large parameters between calls, and no more."""
    large = [p for p in model.parameters() if getattr(p, "ds_numel", 0) > 20]
    assert len(large) > 5 or stage < 3
    whole = [p.ds_summary()["id"] for p in large if p.numel()]
    assert not whole or stage < 3 or kind == "eager", f"{whole} are not freed"


def refused() -> None:
    """A strict call says why ZeRO-3 in 16 bits has no graph."""
    deepspeed: Any = importlib.import_module("deepspeed")
    from hf_runs import causal_lm
    from texts import language_rows

    import onward

    model: Any = onward.accelerate(causal_lm(), strict=True)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3},
    }
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    try:
        engine(language_rows(1)[0]["input_ids"][None])
    except onward.CaptureError as error:
        assert "keeps its parameters in bfloat16; fix: " in str(error), error
    else:
        raise AssertionError("it was not refused")


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
    refused()
    distributed.barrier()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
