"""One of two processes of torchrun that train a model, save, and go on from the newest checkpoint
where they are started again. Where it is asked for, rank 1 is killed once in each of two runs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

RANKS, UPDATES, EVERY, KILLED_AT = 2, 9, 2, 5
STAGES = (0, 1)  # of ZeRO
# torchrun of torch 2.13 keeps one store for all of its tries, in which Gloo may find the addresses
# of processes that have ended, and wait for them
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}


def run(folder: Path, is_killed: bool) -> list[dict[str, Any]]:
    """The weights, moments and losses of each rank at the end of the runs. No process is left."""
    import torch

    folder.mkdir()
    path = os.pathsep.join(p for p in sys.path if p)
    restarts = str(len(STAGES)) if is_killed else "0"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}",
        "--max-restarts", restarts, "--monitor-interval", "0.2",
        __file__, str(folder), "killed" if is_killed else "whole",
    ]  # fmt: skip
    made = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path, **ENVIRONMENT}, timeout=600,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr[-3000:]
    paths = [folder / f"{rank}.pt" for rank in range(RANKS)]
    # written below: tensors, numbers and texts
    return [torch.load(path, weights_only=True) for path in paths]  # noqa: TID251


def trained(folder: Path, rank: int, zero: int, is_killed: bool) -> dict[str, Any]:
    """Trains to the end. The checkpoints of a run are in a folder of its own."""
    import tiny
    import torch

    import onward

    torch.manual_seed(0)
    trainer = onward.Trainer(
        tiny.gpt2(0.1, layers=1, width=16), onward.optim.AdamW(lr=1e-3),
        options={"mesh": {"dp_shard": RANKS}, "zero": zero, "max_grad_norm": 1.0},
    )  # fmt: skip
    checkpoints, losses = folder / f"zero-{zero}", folder / f"losses-{zero}-{rank}"
    if any(checkpoints.glob("checkpoint-*")):
        trainer.resume(checkpoints)
    began = trainer.updates
    while trainer.updates < UPDATES:
        step = trainer.updates
        if is_killed and rank == 1 and step == KILLED_AT and not losses.exists():
            losses.write_text("killed", encoding="ascii")
            os.kill(os.getpid(), signal.SIGKILL)
        loss = float(trainer.train_step(tiny.batch(1 + rank, 8, seed=10 * step + rank)).loss)
        if trainer.updates % EVERY == 0:
            trainer.save(checkpoints, save_total_limit=2)
    state = trainer.state_dict()
    return {
        "began": began, "loss": loss, "draw": torch.rand(3), "model": state["model"],
        "optimizer": state["optimizer"],
    }  # fmt: skip


def main(folder: Path, is_killed: bool) -> None:
    import torch
    from torch import distributed

    from onward import shards

    torch.set_num_threads(1)
    shards.LEAST = 8  # elements of a part, so that parameters of tiny models are cut
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    made = {f"zero {zero}": trained(folder, rank, zero, is_killed) for zero in STAGES}
    distributed.barrier()
    torch.save(made, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2] == "killed")
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
