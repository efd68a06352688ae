"""One rank of runs of transformers' Trainer over Gloo: Onward's, and the stock one with its
DistributedDataParallel; `run` starts several and gives what each has found."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rank_processes import run_ranks
from transformers import TrainerCallback

RANKS, STEPS = 2, 20


@dataclass(frozen=True)
class Case:
    """A run by both Trainers. changes: of TrainingArguments. options: of Onward's Trainer. kind:
    "classes" for a classifier; else a language model, "heads" with other weights on each rank,
    "served" beside a callback that may read gradients."""

    changes: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    kind: str = "language"


WINDOW = {"gradient_accumulation_steps": 2}
SGD = {"optim": "sgd", "learning_rate": 0.1}
APART = {"average_tokens_across_devices": False}  # each process by its own number of labels
EVALUATED = {"eval_strategy": "steps", "eval_steps": 10}
CASES = {
    "language": Case({**SGD, **WINDOW, **EVALUATED}),
    "apart": Case({**SGD, **APART, "label_smoothing_factor": 0.1}, {"mesh": {"dp_shard": 2}}),
    "classes": Case({"weight_decay": 0.1, **WINDOW, **EVALUATED}, kind="classes"),
    "heads": Case({**SGD, **WINDOW, "max_grad_norm": 0.0}, kind="heads"),
    "served": Case({**SGD, **WINDOW}, kind="served"),
}


WHOLE = 8  # rows of a micro-batch of all processes
# by the number of processes: cases in which processes share more than the rows, and the number of
# processes that have rows of their own
PARTS: dict[int, dict[str, tuple[Case, int]]] = {
    2: {
        "zero 3": (Case({**SGD, **WINDOW}, {"zero": 3}), 2),
        "tp": (Case({**SGD, **WINDOW}, {"mesh": {"tp": 2}}), 1),
        "cp": (Case({**SGD, **WINDOW, **APART}, {"mesh": {"cp": 2}}), 1),
    },
    4: {
        "zero 3 and tp": (
            Case({**SGD, **WINDOW}, {"zero": 3, "mesh": {"dp_shard": 2, "tp": 2}}), 2
        ),
        "tp outside": (Case({**SGD, **WINDOW}, {"mesh": {"tp": 2, "dp_replicate": 2}}), 2),
    },
}  # fmt: skip
SAVES = {
    "eval_strategy": "steps", "eval_steps": 10, "save_strategy": "steps", "save_steps": 10,
    "load_best_model_at_end": True, "per_device_eval_batch_size": 3,  # the same batches anywhere
}  # fmt: skip


def run(folder: Path, what: str, ranks: int = RANKS) -> list[dict[str, Any]]:
    """What each rank has saved. what: "cases", "rest" or "parts"."""
    run_ranks(__file__, [str(folder), what, str(ranks)], ranks)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]


def trainer_of(ours: bool, case: Case, folder: Path, **changes: Any) -> Any:
    import hf_runs
    import transformers
    from texts import classified_rows, language_rows

    from onward.integrations.transformers import Trainer

    plain = {"max_steps": STEPS, "ddp_backend": "gloo", "logging_steps": 5, "seed": 3}
    args = hf_runs.arguments(folder, **{**plain, **case.changes, **changes})
    named: dict[str, Any] = {"options": dict(case.options)} if ours else {}
    kind: Any = Trainer if ours else transformers.Trainer
    if case.kind == "classes":
        model, rows, split = hf_runs.classifier(), classified_rows(61), 50
    else:
        model, rows, split = hf_runs.clear_lm(), language_rows(60, unlabelled=6), 45
    if "load_best_model_at_end" in changes:
        split = 48  # epochs of whole batches
    if case.kind == "heads":
        torch.manual_seed(int(os.environ["RANK"]))
        torch.nn.init.normal_(model.lm_head.weight, std=0.02)
    if case.kind == "served":
        named["callbacks"] = [Reads()]
    return kind(
        model, args, train_dataset=rows[:split], eval_dataset=rows[split:],
        compute_metrics=hf_runs.right, **named,
    )  # fmt: skip


class Reads(TrainerCallback):
    """A callback that may read gradients. late: the trainer that gets another one in its third
    step."""

    def __init__(self, late: Any = None) -> None:
        self.late = late
        if late is None:
            self.on_optimizer_step = self.on_step_begin  # type: ignore[method-assign]

    def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        if self.late is not None and state.global_step == 2:
            self.late.add_callback(Reads())


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
        "weights": digest_of(first.model),
        "history": history(first),
        "want": history(second),
        "is whole": first._step_trainer is not None,
    }


def digest_of(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for p in model.parameters():
        found.update(p.detach().numpy().tobytes())
    return found.hexdigest()


class Looks(TrainerCallback):
    """A callback that looks whether the model shows its weights, by the event."""

    def __init__(self) -> None:
        self.whole: dict[str, list[bool]] = {}

    def seen(self, event: str, model: torch.nn.Module) -> None:
        is_whole = not any(p.isnan().any() for p in model.parameters())
        self.whole.setdefault(event, []).append(is_whole)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **named: Any) -> None:
        self.seen("step", model)

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any, **named: Any) -> None:
        self.seen("evaluate", model)

    def on_save(self, args: Any, state: Any, control: Any, model: Any, **named: Any) -> None:
        self.seen("save", model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any, **named: Any) -> None:
        self.seen("end", model)


def of_parts(case: Case, shares: int, folder: Path, ours: bool = True) -> Any:
    """A Trainer of a case whose micro-batches have `WHOLE` rows over all processes. ours: else the
    stock Trainer in one process."""
    size: dict[str, Any] = {"per_device_train_batch_size": WHOLE // shares}
    if not ours:
        size["ddp_backend"] = None
    return trainer_of(ours, case, folder, **SAVES, **size)


def in_parts(folder: Path, ranks: int) -> dict[str, Any]:
    """Runs in which processes hold parts of the model, beside the weights that one process has
    found; and runs that go on from the middle of each along another mesh."""
    from hf_runs import history

    found: dict[str, Any] = {}
    want = torch.load(folder / "want.pt", weights_only=True)  # noqa: TID251  # of this test

    def far(model: torch.nn.Module) -> float:
        have = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
        return float((have - want).norm() / want.norm())

    cases = PARTS[ranks]
    for name, (case, shares) in cases.items():
        trainer, looks = of_parts(case, shares, folder / name), Looks()
        trainer.add_callback(looks)
        trainer.train()
        trainer.save_model(str(folder / f"{name} {os.environ['RANK']}"))
        found[name] = {
            "apart": far(trainer.model),
            "weights": digest_of(trainer.model),
            "history": history(trainer),
            "whole": looks.whole,
            "best": Path(trainer.state.best_model_checkpoint).name,
            "samples": len(trainer.get_train_dataloader()) * WHOLE,
            "rows": trainer.get_total_train_batch_size(trainer.args),
        }
    names = list(cases)
    for name, before in zip(names, [*names[1:], names[0]], strict=True):
        case, shares = cases[name]
        trainer = of_parts(case, shares, folder / f"{name} again")
        trainer.train(resume_from_checkpoint=str(folder / before / "checkpoint-10"))
        found[name] |= {"apart again": far(trainer.model)}
    return found


class Interrupted(Exception):
    """Raised by a callback."""


def resumed(folder: Path, rank: int) -> dict[str, Any]:
    """A run that is stopped and resumed, with dropout and parts of state, beside one that is not;
    and runs that go on from the checkpoints of the other Trainer."""
    case = Case({"optim": "adamw_torch", **WINDOW}, {"zero": 1})
    saves = {"save_strategy": "steps", "save_steps": 5, "save_total_limit": 2, "max_steps": 15}

    class Stop(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            if state.global_step == 12:
                raise Interrupted

    def made(place: str, dropout: float = 0.0, ours: bool = True) -> Any:
        trainer = trainer_of(ours, case, folder / place, **saves)
        for module in trainer.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = dropout
        return trainer

    whole, stopped, again = made("whole", 0.2), made("parts", 0.2), made("parts", 0.2)
    whole.train()
    held = whole.optimizer.state
    assert held and not any("exp_avg" in entry for entry in held.values()), "state is cut"
    stopped.add_callback(Stop())
    with suppress(Interrupted):
        stopped.train()
    again.train(resume_from_checkpoint=True)
    same = all(map(torch.equal, whole.model.parameters(), again.model.parameters()))
    found: dict[str, Any] = {"same": same, "losses": []}
    for each in (whole, again):
        found["losses"].append([line["loss"] for line in each.state.log_history if "loss" in line])
    if rank == 0:
        found["kept"] = sorted(path.name for path in (folder / "parts").iterdir())
    stock = made("stock", ours=False)
    stock.train()
    ours = made("ours")
    ours.train()
    crossed = [made("a"), made("b", ours=False)]
    for trainer, place in zip(crossed, ("stock", "ours"), strict=True):
        trainer.train(resume_from_checkpoint=str(folder / place / "checkpoint-10"))
    found["apart"] = [apart(each.model, stock.model) for each in (ours, *crossed)]
    return found


def refusals(folder: Path) -> dict[str, str]:
    """What is said of runs that cannot be right."""
    from onward.errors import OnwardError

    def late() -> None:
        trainer = trainer_of(True, Case(SGD), folder)
        trainer.add_callback(Reads(trainer))
        trainer.train()

    def begun(case: Case) -> None:
        trainer_of(True, case, folder).train()

    tried: dict[str, Callable[[], None]] = {
        "late": late,
        "mesh": lambda: begun(Case(options={"mesh": {"dp_replicate": 3}})),
        "uneven": lambda: begun(Case({"accelerator_config": {"even_batches": False}})),
        "lost": lambda: begun(Case(options={"zero": 1}, kind="served")),
        "optimizer": lambda: begun(Case({"optim": "adafactor"})),
    }
    said: dict[str, str] = {}
    for name, act in tried.items():
        try:
            act()
        except OnwardError as error:
            said[name] = str(error)
    return said


def main(folder: Path, what: str, ranks: int, rank: int) -> None:
    import hf_runs
    from torch import distributed

    from onward import compile, shards
    from onward.distribute.tensor import DeviceRates

    torch.set_num_threads(1)
    shards.LEAST = 8  # elements of a part, so that parameters of tiny models are cut
    slow = DeviceRates(1e8, 1e9, 1e-7, 1e8, 1e-6)
    compile.link_rates = lambda *_: slow  # type: ignore[attr-defined]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}  # as torchrun does
    place = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=place, rank=rank, world_size=ranks)
    made: dict[str, Any] = {}
    with hf_runs.quiet():
        if what == "cases":
            made = {name: compared(case, folder / name) for name, case in CASES.items()}
        elif what == "parts":
            made = in_parts(folder, ranks)
        else:
            made["resumed"] = resumed(folder / "resumed", rank)
            made["said"] = refusals(folder / "refused")
    (folder / f"{rank}.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    os._exit(0)  # Gloo's threads may wait for Python's lock where Python waits for them
