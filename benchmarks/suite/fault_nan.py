"""A batch that makes the loss NaN (R12): does it reach the weights, is it shown, is it named?"""

from __future__ import annotations

import logging
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from suite.fault_process import in_child
from suite.fault_systems import System, Task, digest
from suite.fault_table import GOOD, Effort, Line, Tally, row
from suite.progress import Clock, say

ROWS = 2
APPLIED = "the update was applied"
HIDDEN = "shown as another number"
UNNAMED = "nothing says where it comes from"


class Poisoned(nn.Module):
    """A language model whose embeddings are multiplied by a number of each sample, f32[B]."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Task().model()

    def forward(self, input_ids: Tensor, factor: Tensor, labels: Tensor) -> dict[str, Tensor]:
        embedded = self.model.transformer.wte(input_ids) * factor[:, None, None]
        return {"loss": self.model(inputs_embeds=embedded, labels=labels).loss}


class Samples(Dataset[dict[str, Tensor]]):
    """Samples in their order; one of them has a factor that is not finite."""

    def __init__(self, bad: int, factor: float) -> None:
        self._tokens, self._bad, self._factor = Task().data(), bad, factor

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        factor = self._factor if index == self._bad else 1.0
        return {**self._tokens[index], "factor": torch.tensor(factor)}


class Seen(NamedTuple):
    """What a run showed: digests before the update with the bad batch and behind it, the loss that
    was reported for it, and what was written to the log."""

    before: str
    after: str
    loss: float
    log: str


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def by_onward(data: Samples, at: int) -> Seen:
    """An `onward.Trainer` with its default options."""
    import onward

    heard = Lines()
    logging.getLogger("onward").addHandler(heard)
    model = Poisoned()
    trainer = onward.Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    before = after = ""
    loss = 0.0
    for number, batch in enumerate(DataLoader(data, ROWS)):
        if number == at:
            before = digest(model, trainer.state_dict()["optimizer"])
        result = trainer.train_step(**batch)
        if number == at:
            after, loss = digest(model, trainer.state_dict()["optimizer"]), float(result.loss)
    return Seen(before, after, loss, "\n".join(heard.lines))


def by_transformers(data: Samples, at: int) -> Seen:
    """transformers' Trainer with its default options, which logs each step."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    heard = Lines()
    logging.getLogger("transformers").addHandler(heard)
    found: list[str] = []

    class Told(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step in (at, at + 1):
                moments = more["optimizer"].state_dict()["state"]
                found.append(digest(more["model"], moments))

    class InOrder(Trainer):
        def get_train_dataloader(self) -> Any:
            return DataLoader(data, ROWS)

    place = tempfile.TemporaryDirectory()
    arguments = TrainingArguments(
        output_dir=place.name, num_train_epochs=1, learning_rate=1e-3, use_cpu=True, seed=1,
        per_device_train_batch_size=ROWS, report_to="none", logging_steps=1, save_strategy="no",
        disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = InOrder(Poisoned(), arguments, train_dataset=data, callbacks=[Told()])
    with place:
        trainer.train()
    losses = {
        entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry
    }
    return Seen(found[0], found[1], float(losses[at + 1]), "\n".join(heard.lines))


def by_accelerate(data: Samples, at: int) -> Seen:
    """accelerate in a loop that clips, as its examples do; the loss is the loop's to show."""
    from accelerate import Accelerator

    heard = Lines()
    logging.getLogger("accelerate").addHandler(heard)
    accelerator = Accelerator(cpu=True)
    plain = Poisoned()
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(plain, adamw, DataLoader(data, ROWS))
    before = after = ""
    shown = 0.0
    for number, batch in enumerate(loader):
        if number == at:
            before = digest(plain, optimizer.state_dict()["state"])
        loss = model(**batch)["loss"]
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number == at:
            after, shown = digest(plain, optimizer.state_dict()["state"]), float(loss.detach())
    return Seen(before, after, shown, "\n".join(heard.lines))


RUNS: dict[str, Callable[[Samples, int], Seen]] = {
    "Onward": by_onward,
    "transformers": by_transformers,
    "accelerate": by_accelerate,
}


def poisoned(
    effort: Effort, systems: Mapping[str, System], work: Path, clock: Clock
) -> dict[str, Any]:
    """R12: one sample of one batch is multiplied by NaN or infinity."""
    lines = [
        Line("weights and moments stay as they were"),
        Line("the loss of the step is shown as NaN or infinity"),
        Line("the log names the step and where the number comes from"),
    ]
    cases = [(at, bad) for at in (3, 5, 8) for bad in (math.nan, math.inf)]
    for name in systems:
        tallies = [Tally() for _ in lines]
        for at, bad in cases:
            if clock.over():
                break
            data = Samples(at * ROWS + 1, bad)
            ended = in_child(lambda n=name, d=data, a=at: RUNS[n](d, a))
            if ended.status:
                say(ended.said[-1000:])
                for tally in tallies:
                    tally.add("stopped with an error")
                continue
            seen = Seen(*ended.answer)
            tallies[0].add(GOOD if seen.before == seen.after else APPLIED)
            tallies[1].add(HIDDEN if math.isfinite(seen.loss) else GOOD)
            named = f"update {at + 1} " in seen.log and "factor" in seen.log
            tallies[2].add(GOOD if named else UNNAMED)
        for line, tally in zip(lines, tallies, strict=True):
            line.cells[name] = tally
        say(f"R12 {name}: {[t.told() for t in tallies]}")
    promise = (
        "One sample of one batch has an input that is NaN or infinite; options are the defaults. "
        f'"{APPLIED}": weights are NaN from there on.'
    )
    return row("a number that is not finite", promise, lines)
