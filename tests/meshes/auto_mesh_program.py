"""One of two processes that train with mesh="auto" over Gloo, and what each finds; `run` starts
both and returns their results."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rank_processes import run_ranks

ROWS, LENGTH, STEPS = 4, 6, 3
PLENTY = 1 << 34


def batch(step: int, rank: int | None) -> dict[str, torch.Tensor]:
    """A rank's rows of the batch of a step; None: all of them."""
    import tiny

    data = tiny.batch(2 * ROWS, LENGTH, seed=step)
    return data if rank is None else {n: x[rank * ROWS :][:ROWS] for n, x in data.items()}


def trainer_of(width: int = 64, **options: Any) -> Any:
    import tiny

    import onward

    model = tiny.gpt2(0.1, layers=2, width=width, n_head=4, vocab_size=128)
    return onward.Trainer(model, onward.optim.AdamW(lr=1e-3, eps=1e-4), options=options)


def alone(**options: Any) -> dict[str, torch.Tensor]:
    """The weights after the steps, by one process with the batch of both."""
    trainer = trainer_of(**options)
    for step in range(STEPS):
        trainer.train_step(batch(step, None))
    return {n: p.detach().clone() for n, p in trainer.model.named_parameters()}


class Lines(logging.Handler):
    """The lines that are logged."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(f"{record.levelname} {record.getMessage()}")


def found(
    rank: int, memory: Callable[[int], int], is_one_batch: bool = False, **options: Any
) -> dict[str, Any]:
    """What a rank finds after the steps. memory: bytes that are free on the host, as a rank sees
    it. is_one_batch: both ranks are given the batch of both."""
    from onward.train import mesh_choice

    lines = Lines()
    mesh_choice.log.addHandler(lines)
    mesh_choice.log.setLevel(logging.INFO)
    mesh_choice.free_bytes = lambda device: memory(rank)
    try:
        trainer = trainer_of(mesh="auto", **options)
        for step in range(STEPS):
            trainer.train_step(batch(step, None if is_one_batch else rank))
    finally:
        mesh_choice.log.removeHandler(lines)
    shown = any(bool(p.isnan().all()) for p in trainer.model.parameters())
    trainer.gather()
    return {
        "mesh": trainer.options.mesh, "zero": trainer.options.zero, "updates": trainer.updates,
        "said": [line for line in lines.said if "auto" in line], "is cut": shown,
        "weights": {n: p.detach().clone() for n, p in trainer.model.named_parameters()},
    }  # fmt: skip


def plans(rank: int) -> dict[str, Any]:
    """For each mesh: the plan that runs, and what was predicted of it on paper."""
    import tiny

    from onward.plan import sequence_hash

    said: dict[str, Any] = {}
    for text, zero in (("dp_replicate=2", 0), ("dp_shard=2", 1), ("dp_shard=2", 3), ("tp=2", 0)):
        axis = text.partition("=")[0]
        is_tensor = axis == "tp"  # a batch that is worth cutting weights for
        data, width = (tiny.batch(16, 32), 256) if is_tensor else (batch(0, rank), 64)
        trainer = trainer_of(width, mesh={axis: 2}, zero=zero)
        trainer.train_step(data)
        assert trainer._weights.is_cut == (is_tensor or zero == 3)
        own = trainer_of(width, mesh="auto", zero=zero) if zero else trainer_of(width)
        paper = _on_paper(own, data, {axis: 2}, zero)
        plan = trainer.plan
        said[f"{text} {zero}"] = {
            "launches": len(plan.launches), "arena": plan.arena_bytes,
            "sequence": sequence_hash(plan),
        }, {
            "launches": len(paper.launches), "arena": paper.arena_bytes,
            "sequence": sequence_hash(paper),
        }  # fmt: skip
    return said


def _on_paper(trainer: Any, data: Any, sizes: dict[str, int], zero: int) -> Any:
    from onward.meshes.candidates import candidate
    from onward.meshes.on_paper import rank_step
    from onward.train.explain import subject_of

    bound = trainer._bind((data,), {})
    subject: Any = subject_of(trainer.snapshot(), trainer._steps, bound, ())
    rows = bound.batch_size
    return rank_step(subject, candidate(sizes, zero), rows).remade.executable.plan


def failed(rank: int) -> str:
    """What each rank says where rank 0 cannot predict."""
    from onward.errors import OnwardError
    from onward.train import mesh_choice

    def broken(*args: Any) -> Any:
        raise ValueError("no prediction")

    mesh_choice.chosen_mesh, before = broken, mesh_choice.chosen_mesh
    try:
        trainer_of(mesh="auto").train_step(batch(0, rank))
    except (ValueError, OnwardError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        mesh_choice.chosen_mesh = before
    return "nothing"


def apart(rank: int) -> str:
    """What each rank says where only one of them is to choose."""
    from onward.errors import OnwardError

    mesh = {"dp_replicate": 2} if rank else "auto"
    try:
        trainer_of(mesh=mesh).train_step(batch(0, rank))
    except OnwardError as error:
        return str(error)
    return "nothing"


def _main(folder: Path, rank: int) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    whole = 4 * sum(p.numel() for p in trainer_of().model.parameters())
    small = int(6 * whole)  # of both ranks together, beside the weights that both have
    results = {
        "plenty": found(rank, lambda rank: PLENTY),
        "small": found(rank, lambda rank: small),
        "unlike": found(rank, lambda rank: small if rank else PLENTY),
        "one batch": found(rank, lambda rank: PLENTY, is_one_batch=True),
        "stage": found(rank, lambda rank: PLENTY, zero=1),
        "window": found(rank, lambda rank: small, gradient_accumulation_steps=3),
        "failed": failed(rank),
        "plans": plans(rank),
        "apart": apart(rank),
    }
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()


def run(folder: Path) -> list[dict[str, Any]]:
    """Runs both processes; returns what each has found."""
    run_ranks(__file__, [str(folder)], 2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]  # noqa: TID251


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
