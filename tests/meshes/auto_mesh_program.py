"""One of two processes that train with mesh="auto" over Gloo, and what each finds, or of four whose
plans are compared with those on paper; `run` starts them and returns their results."""

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


def trainer_of(width: int = 64, optimizer: str = "AdamW", **options: Any) -> Any:
    import tiny

    import onward

    model = tiny.gpt2(0.1, layers=2, width=width, n_head=4, vocab_size=128)
    made = {"AdamW": onward.optim.AdamW(lr=1e-3, eps=1e-4), "LAMB": onward.optim.LAMB()}
    return onward.Trainer(model, made[optimizer], options=options)


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


PLANS: dict[int, dict[str, tuple[dict[str, int], int, dict[str, Any]]]] = {  # by ranks
    2: {
        "data": ({"dp_replicate": 2}, 0, {}),
        "zero 1": ({"dp_shard": 2}, 1, {}),
        "zero 3": ({"dp_shard": 2}, 3, {}),
        "tp": ({"tp": 2}, 0, {}),
        "tp positions": ({"tp": 2}, 0, {"sequence_parallel": True}),
        "zero 1 lamb": ({"dp_shard": 2}, 1, {"optimizer": "LAMB"}),
        "pp": ({"pp": 2}, 0, {}),
        "pp GPipe": ({"pp": 2}, 0, {"pipeline_schedule": "GPipe", "pipeline_microbatches": 4}),
        "pp zero bubble": ({"pp": 2}, 0, {"pipeline_schedule": "InterleavedZeroBubble"}),
    },
    4: {
        "zero 1 tp": ({"dp_shard": 2, "tp": 2}, 1, {}),
        "zero 3 tp": ({"dp_shard": 2, "tp": 2}, 3, {}),
        "zero 2 tp window": ({"dp_shard": 2, "tp": 2}, 2, {"gradient_accumulation_steps": 1}),
        "zero 1 cp": ({"dp_shard": 2, "cp": 2}, 1, {}),
        "cp tp": ({"cp": 2, "tp": 2}, 0, {}),
        "data pp": ({"dp_replicate": 2, "pp": 2}, 0, {}),
        "zero 1 pp": ({"dp_shard": 2, "pp": 2}, 1, {"pipeline_schedule": "Interleaved1F1B"}),
        "zero 3 pp": ({"dp_shard": 2, "pp": 2}, 3, {}),
        "pp cp": ({"pp": 2, "cp": 2}, 0, {}),
        "pp tp": ({"pp": 2, "tp": 2}, 0, {}),
    },
}


def plans(rank: int, ranks: int) -> dict[str, Any]:
    """For each mesh: the plan that runs, and what was predicted of it on paper."""
    import tiny

    from onward.plan import sequence_hash

    said: dict[str, Any] = {}
    for name, (sizes, zero, more) in PLANS[ranks].items():
        is_tensor = "tp" in sizes  # a batch that is worth cutting weights for
        data, width = (tiny.batch(16, 32), 256) if is_tensor else (batch(0, rank % 2), 64)
        is_one = ("cp" in sizes or "pp" in sizes) and not is_tensor
        data = tiny.batch(ROWS, LENGTH) if is_one else data
        trainer = trainer_of(width, mesh=sizes, zero=zero, **more)
        trainer.train_step(data)
        assert trainer._weights.is_cut == (is_tensor or zero == 3 or "pp" in sizes)
        more = {n: x for n, x in more.items() if n != "sequence_parallel"}
        own = trainer_of(width, **({"mesh": "auto", "zero": zero} if zero else {}), **more)
        paper = _on_paper(own, data, trainer.options, trainer._ranks.mesh.coordinate("pp"))
        plan = trainer.plan
        said[name] = {
            "launches": len(plan.launches), "arena": plan.arena_bytes,
            "sequence": sequence_hash(plan),
        }, {
            "launches": len(paper.launches), "arena": paper.arena_bytes,
            "sequence": sequence_hash(paper),
        }  # fmt: skip
    return said


def _on_paper(trainer: Any, data: Any, options: Any, stage: int) -> Any:
    from onward.meshes.candidates import candidate
    from onward.meshes.on_paper import rank_steps
    from onward.shards import PipelineCut
    from onward.train.explain import subject_of

    bound = trainer._bind((data,), {})
    subject: Any = subject_of(trainer.snapshot(), trainer._steps, bound, ())
    rows = bound.batch_size
    asked = candidate(options.mesh, options.zero, options.sequence_parallel)
    micro_batches = options.pipeline_microbatches or asked.size("pp")
    cut = PipelineCut(options.pipeline_schedule, micro_batches, options.stages_per_rank)
    return rank_steps(subject, asked, rows, cut)[stage].remade.executable.plan


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


def _main(folder: Path, ranks: int, rank: int) -> None:
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    results = of_two(rank) if ranks == 2 else {}
    results["plans"] = plans(rank, ranks)
    torch.save(results, folder / f"{rank}.pt")
    distributed.destroy_process_group()


def of_two(rank: int) -> dict[str, Any]:
    """What one of two ranks finds that choose their mesh."""
    whole = 4 * sum(p.numel() for p in trainer_of().model.parameters())
    small = int(7.9 * whole)  # of both ranks together, beside the weights that both have
    return {
        "plenty": found(rank, lambda rank: PLENTY),
        "small": found(rank, lambda rank: small),
        "unlike": found(rank, lambda rank: small if rank else PLENTY),
        "one batch": found(rank, lambda rank: PLENTY, is_one_batch=True),
        "stage": found(rank, lambda rank: PLENTY, zero=1),
        "window": found(rank, lambda rank: small, gradient_accumulation_steps=3),
        "failed": failed(rank),
        "apart": apart(rank),
    }


def run(folder: Path, ranks: int = 2) -> list[dict[str, Any]]:
    """Runs the processes; returns what each has found."""
    run_ranks(__file__, [str(folder), str(ranks)], ranks)
    return [torch.load(folder / f"{rank}.pt") for rank in range(ranks)]  # noqa: TID251


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
