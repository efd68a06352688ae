"""One rank of runs of transformers' Trainer over Gloo: Onward's, and the stock one with its
DistributedDataParallel; `run` starts two and gives what each has found."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rank_processes import run_ranks

RANKS, STEPS = 2, 20


@dataclass(frozen=True)
class Case:
    """A run by both Trainers. changes: of TrainingArguments. options: of Onward's Trainer."""

    changes: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "language"


WINDOW = {"gradient_accumulation_steps": 2}
SGD = {"optim": "sgd", "learning_rate": 0.1}
CASES = {
    "sgd": Case(SGD),
    "sgd window": Case({**SGD, **WINDOW, "average_tokens_across_devices": False}),
    "adamw": Case({"eval_strategy": "steps", "eval_steps": 10}),
    "adamw window": Case(WINDOW),
    "own average": Case({**SGD, "average_tokens_across_devices": False}),
    "classifier": Case({**SGD, **WINDOW, "eval_strategy": "steps", "eval_steps": 10}, {}, "classes"),
    "smoothed": Case({**SGD, "label_smoothing_factor": 0.1}),
    "zero": Case({"optim": "adamw_torch", **WINDOW}, {"zero": 2}),
    "mesh": Case({**SGD, "max_grad_norm": 0.0}, {"mesh": {"dp_shard": 2}}),
}


def run(folder: Path, what: str, codes: Any = ()) -> list[dict[str, Any]]:
    """What each rank has saved."""
    run_ranks(__file__, [str(folder), what], RANKS, codes)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def trainer_of(ours: bool, case: Case, folder: Path, **changes: Any) -> Any:
    import hf_runs
    import transformers
    from texts import classified_rows, language_rows

    from onward.integrations.transformers import Trainer

    plain = {"max_steps": STEPS, "ddp_backend": "gloo", "logging_steps": 5, "seed": 3}
    args = hf_runs.arguments(folder, **{**plain, **case.changes, **changes})
    named: dict[str, Any] = {"options": dict(case.options)} if ours else {}
    kind = Trainer if ours else transformers.Trainer
    if case.kind == "classes":
        model, rows, split = hf_runs.classifier(), classified_rows(61), 50
    else:
        model, rows, split = hf_runs.clear_lm(), language_rows(60, unlabelled=6), 45
    return kind(
        model, args, train_dataset=rows[:split], eval_dataset=rows[split:],
        compute_metrics=hf_runs.right, **named,
    )  # fmt: skip


def apart(found: Any, want: Any) -> float:
    a = torch.cat([p.detach().double().reshape(-1) for p in found.parameters()])
    b = torch.cat([p.detach().double().reshape(-1) for p in want.parameters()])
    return float((a - b).norm() / b.norm())


def compared(case: Case, folder: Path) -> dict[str, Any]:
    from hf_runs import history

    trainers = []
    for ours in (True, False):
        trainer = trainer_of(ours, case, folder / str(ours))
        trainer.train()
        trainers.append(trainer)
    first, second = trainers
    return {
        "apart": apart(first.model, second.model),
        "history": history(first), "want": history(second),
        "ranks": first.onward_trainer._ranks.mesh.ranks,
    }  # fmt: skip


def main(folder: Path, what: str, rank: int) -> None:
    import hf_runs

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": (folder / "port").read_text(),
    }
    made: dict[str, Any] = {}
    with hf_runs.quiet():
        for name, case in CASES.items():
            if what in ("cases", name):
                made[name] = compared(case, folder / name)
    (folder / f"{rank}.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
