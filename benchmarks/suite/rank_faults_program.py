"""One rank of a run in which something happens to the last rank: Onward, DDP by hand, transformers.

    python -m suite.rank_faults_program SYSTEM FAULT FOLDER

Ranks find one another by the variables that torchrun sets. At the end each writes what it has.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from suite.fault_systems import Task, digest

TIMEOUT = 20.0  # seconds that each system is told to wait for a rank
UPDATES, AT, EVERY = 6, 3, 2  # updates; the one before which it happens; between checkpoints
KILLED, STOPPED, ASLEEP = "killed", "stopped", "asleep in its data loader"
WEIGHTS, SHAPES, NAN, SHORT = "other weights", "another shape", "NaN", "fewer batches"
RESTARTED = "killed, and all started again"


class Scaled(nn.Module):
    """A GPT-2 whose loss is multiplied by a number of the batch."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model = task.model()

    def forward(self, input_ids: Any, labels: Any, scale: Any) -> dict[str, Any]:
        loss = self.model(input_ids=input_ids, labels=labels).loss
        return {"loss": loss * scale.mean()}


class Rank:
    """What a rank is given, and what happens to it."""

    def __init__(self, fault: str, folder: Path) -> None:
        self.fault, self.folder = fault, folder
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.is_odd = self.rank == self.ranks - 1
        self.updates = UPDATES - 2 * (fault == SHORT and self.is_odd)

    def model(self) -> nn.Module:
        wide = 2 if self.fault == SHAPES and self.is_odd else 1
        model = Scaled(Task(width=32 * wide))
        if self.fault == WEIGHTS and self.is_odd:
            with torch.no_grad():
                next(model.parameters())[0, 0] += 0.125
        return model

    def batch(self, update: int) -> dict[str, torch.Tensor]:
        """The batch of an update, from 1; what happens in reading it happens here."""
        is_time = update == AT and self.is_odd
        again = (self.folder / "happened").exists()
        if is_time and self.fault in (KILLED, STOPPED, ASLEEP, RESTARTED) and not again:
            (self.folder / "happened").write_text(repr(time.time()), encoding="ascii")
            if self.fault == ASLEEP:
                time.sleep(1e6)
            os.kill(os.getpid(), signal.SIGSTOP if self.fault == STOPPED else signal.SIGKILL)
        draw = torch.Generator().manual_seed(100 * update + self.rank)
        ids = torch.randint(1, 97, (2, 16), generator=draw)
        scale = torch.full((2,), float("nan") if is_time and self.fault == NAN else 1.0)
        return {"input_ids": ids, "labels": ids.clone(), "scale": scale}

    def ended(self, model: nn.Module, moments: Mapping[str, Any], updates: int, at: int) -> None:
        """Writes what the rank has. at: updates that it did not have to do."""
        finite = all(bool(p.isfinite().all()) for p in model.parameters())
        said = {"digest": digest(model, moments), "finite": finite, "updates": updates, "from": at}
        (self.folder / f"end{self.rank}").write_text(json.dumps(said), encoding="ascii")


def _joined() -> None:
    distributed.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))


def run_onward(given: Rank) -> None:
    """A Trainer with the option `mesh`, in a loop of one's own."""
    import onward

    _joined()
    torch.manual_seed(11)
    model = given.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = onward.Trainer(
        model, optimizer,
        options={"mesh": {"dp_replicate": given.ranks},
                 "gradient_accumulation_average": "micro_batches"},
    )  # fmt: skip
    place = given.folder / "saved"
    if any(place.glob("checkpoint-*")):
        trainer.resume(place)
    start = trainer.updates
    for update in range(start + 1, given.updates + 1):
        trainer.train_step(given.batch(update))
        if trainer.updates and trainer.updates % EVERY == 0:
            trainer.save(place, save_total_limit=1)
    state = trainer.state_dict()["optimizer"]
    given.ended(model, state, trainer.updates, start)


def run_ddp(given: Rank) -> None:
    """DistributedDataParallel in a loop by hand, with checkpoints as in PyTorch's tutorial."""
    _joined()
    torch.manual_seed(11)
    model = given.model()
    shared = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    place, start = given.folder / "saved.pt", 0
    if place.exists():
        found = torch.load(place, weights_only=True)  # noqa: TID251 - as the tutorial has it
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        start = int(found["updates"])
    for update in range(start + 1, given.updates + 1):
        optimizer.zero_grad()
        shared(**given.batch(update))["loss"].backward()
        optimizer.step()
        if update % EVERY == 0 and given.rank == 0:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**saved, "updates": update}, given.folder / "part.pt")
            (given.folder / "part.pt").rename(place)
    given.ended(model, optimizer.state_dict()["state"], given.updates, start)


def run_transformers(given: Rank) -> None:
    """transformers' Trainer."""
    from torch.utils.data import Dataset
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Rows(Dataset[dict[str, torch.Tensor]]):
        """Rows in the order in which the sampler deals them to the ranks."""

        def __len__(self) -> int:
            return 2 * given.ranks * given.updates

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            update, row = index // (2 * given.ranks) + 1, index % 2
            return {name: x[row] for name, x in given.batch(update).items()}

    class InOrder(Trainer):
        """Takes rows in their order, as the other systems do."""

        def _get_train_sampler(self, *args: Any, **more: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)  # type: ignore[arg-type]

    model = given.model()
    arguments = TrainingArguments(
        output_dir=str(given.folder / "saved"), max_steps=given.updates, learning_rate=1e-3,
        per_device_train_batch_size=2, save_steps=EVERY, save_total_limit=1, use_cpu=True,
        report_to="none", logging_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
        ddp_backend="gloo", ddp_timeout=int(TIMEOUT), seed=11, remove_unused_columns=False,
    )  # fmt: skip
    trainer = InOrder(model, arguments, train_dataset=Rows())
    place = given.folder / "saved"
    last = get_last_checkpoint(str(place)) if place.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    start = int(last.rpartition("-")[2]) if last else 0
    state: Any = trainer.optimizer
    given.ended(model, state.state_dict()["state"], trainer.state.global_step, start)


SYSTEMS: dict[str, Callable[[Rank], None]] = {
    "Onward": run_onward, "DDP": run_ddp, "transformers": run_transformers,
}  # fmt: skip

if __name__ == "__main__":
    torch.set_num_threads(1)
    SYSTEMS[sys.argv[1]](Rank(sys.argv[2], Path(sys.argv[3])))
    if distributed.is_initialized():
        distributed.destroy_process_group()
