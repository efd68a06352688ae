"""One of several processes that train on one mesh and save, or that resume on another mesh what was
saved; `run` starts all of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from rank_processes import run_ranks
from ranks_cases import WINDOW, Case, gpt2, t5, trained, trainer_of
from ranks_program import join
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from onward.checkpoint import empty_state

Tensors = dict[str, torch.Tensor]
BEFORE, AFTER = range(3), range(3, 6)  # the steps before a checkpoint, and behind it


@dataclass(frozen=True)
class Placed(Case):
    """A run on one mesh. sizes: of it, by axis. rows of a step go to the ranks along axes of
    data."""

    sizes: dict[str, int] = field(default_factory=dict)

    def share(self, rank: int, ranks: int) -> tuple[int, int]:
        alike = prod(self.sizes.get(axis, 1) for axis in ("tp", "cp", "pp"))
        return rank // alike, ranks // alike

    def options_of(self, ranks: int) -> dict[str, Any]:
        return {**self.options, "mesh": self.sizes or None, "zero": self.zero}


MESHES: dict[str, tuple[dict[str, int], int]] = {  # sizes, and the stage of ZeRO
    "one process": ({}, 0),
    "dp 2": ({"dp_replicate": 2}, 0),
    "zero 1 of 2": ({"dp_shard": 2}, 1),
    "zero 2 of 2": ({"dp_shard": 2}, 2),
    "zero 3 of 2": ({"dp_shard": 2}, 3),
    "tp 2": ({"tp": 2}, 0),
    "cp 2": ({"cp": 2}, 0),
    "pp 2": ({"pp": 2}, 0),
    "zero 1 of 4": ({"dp_shard": 4}, 1),
    "zero 2 of 2 x 2": ({"dp_replicate": 2, "dp_shard": 2}, 2),
    "zero 3 of 4": ({"dp_shard": 4}, 3),
    "dp 2 x tp 2": ({"dp_replicate": 2, "tp": 2}, 0),
    "zero 1 x tp 2": ({"dp_shard": 2, "tp": 2}, 1),
    "cp 2 x tp 2": ({"cp": 2, "tp": 2}, 0),
    "zero 2 x cp 2": ({"dp_shard": 2, "cp": 2}, 2),
    "dp 2 x pp 2": ({"dp_replicate": 2, "pp": 2}, 0),
    "zero 2 x pp 2": ({"dp_shard": 2, "pp": 2}, 2),
    "pp 2 x tp 2": ({"pp": 2, "tp": 2}, 0),
    "zero 3 x pp 2": ({"dp_shard": 2, "pp": 2}, 3),
    "pp 2 x cp 2": ({"pp": 2, "cp": 2}, 0),
}  # fmt: skip
RUNS: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, Any], bool]] = {  # padding
    "gpt2 within a window": (gpt2, WINDOW, False),
    "t5 between updates": (t5, {"max_grad_norm": 0.5}, True),
}
Found = dict[str, dict[str, Any]]  # by mesh, and by the mesh that saved


def ranks_of(mesh: str) -> int:
    return prod(MESHES[mesh][0].values())


def case_of(run_name: str, mesh: str) -> Placed:
    model, options, padding = RUNS[run_name]
    sizes, zero = MESHES[mesh]
    return Placed(model, options, "AdamW", padding, zero=zero, sizes=sizes)


def outcome(trainer: Any, losses: list[float]) -> Tensors:
    """Weights, moments and losses."""
    state = trainer.state_dict() if not trainer.micro_steps else {"model": {}, "optimizer": {}}
    trainer.gather()
    found = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    found |= {f"state.{n}": x for n, x in state["optimizer"].items()}
    return found | {"losses": torch.tensor(losses, dtype=torch.float64)}


def saved(folder: Path, run_name: str, mesh: str, rank: int) -> Tensors:
    """Trains, saves, and goes on."""
    case, ranks = case_of(run_name, mesh), ranks_of(mesh)
    trainer = trainer_of(case, ranks)
    trained(trainer, case, rank, ranks, BEFORE)
    trainer.save(folder / "checkpoints" / run_name / mesh)
    if not trainer.micro_steps:
        state = {"trainer": trainer.state_dict()}
        save(state, checkpoint_id=folder / "torch" / mesh)
    return outcome(trainer, trained(trainer, case, rank, ranks, AFTER))


def resumed(
    folder: Path, run_name: str, mesh: str, names: list[str], rank: int
) -> dict[str, Tensors]:
    """Goes on from what each mesh has saved, its own first; `new`: from the mesh behind it, with a
    new Trainer. One that has gone on before has chosen its cuts, by which sums of a window may be
    added up in another order."""
    case, ranks = case_of(run_name, mesh), ranks_of(mesh)

    def gone_on(trainer: Any, source: str) -> Tensors:
        trainer.resume(folder / "checkpoints" / run_name / source)
        return outcome(trainer, trained(trainer, case, rank, ranks, AFTER))

    at = names.index(mesh)
    trainer = trainer_of(case, ranks)
    found = {source: gone_on(trainer, source) for source in [*names[at:], *names[:at]]}
    source = names[(at + 1) % len(names)]
    found["new"] = gone_on(trainer_of(case, ranks), source)
    if (folder / "torch" / source).exists():
        state = empty_state(folder / "torch" / source)
        load(state, checkpoint_id=folder / "torch" / source)
        trainer = trainer_of(case, ranks)
        trainer.load_state_dict(state["trainer"])
        again = outcome(trainer, trained(trainer, case, rank, ranks, AFTER))
        assert all(torch.equal(again[name], x) for name, x in found["new"].items())
        found["torch's"] = again
    return found


# ---- processes


def run(folder: Path, what: str, run_name: str, names: list[str]) -> Found:
    """What rank 0 of each of these meshes has found. what: "save" or "resume"."""
    found: Found = {}
    for ranks in sorted({ranks_of(name) for name in names}):
        place = folder / f"{what}-{ranks}"
        place.mkdir()
        arguments = [str(folder), str(place), what, run_name, ",".join(names), str(ranks)]
        run_ranks(__file__, arguments, ranks, seconds=60 * (5 + len(names)))
        found |= torch.load(place / "found.pt", weights_only=True)  # noqa: TID251  # written below
    return found


def main(
    folder: Path, place: Path, what: str, run_name: str, names: list[str], ranks: int, rank: int
) -> None:
    from torch import distributed

    os.environ["ONWARD_GRAPH_CACHE"], os.environ["ONWARD_CACHE"] = "1", str(folder / "graphs")
    join(place, rank, ranks)
    found: Found = {}
    for mesh in (name for name in names if ranks_of(name) == ranks):
        if what == "save":
            found[mesh] = saved(folder, run_name, mesh, rank)
        else:
            found[mesh] = resumed(folder, run_name, mesh, names, rank)
    distributed.barrier()
    if rank == 0:
        torch.save(found, place / "found.pt")


if __name__ == "__main__":
    _, held, own, action, named, meshes, number, at = sys.argv
    main(Path(held), Path(own), action, named, meshes.split(","), int(number), int(at))
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
