"""Three systems that run one training task: Onward, transformers' Trainer, and accelerate.

Each is used as its documentation says, with the same tiny GPT-2, data, optimizer and schedule. A
system is a function that goes on from the newest checkpoint in a folder, trains to the end, saves
on the way, and returns the digest of what it ends with. Digests of two systems are not comparable:
their orders of samples and dropout masks differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, get_scheduler

SEED = 11


@dataclass(frozen=True)
class Task:
    """What a run does. An update takes `window` batches of `rows` samples of `tokens` tokens.

    save_every: updates between checkpoints; 0: none. keep: checkpoints that stay, for systems that
    remove old ones. random: samples draw random numbers when they are read. stop: the run saves and
    ends after so many micro-batches; 0: it runs to the end. on_sigterm: transformers' Trainer saves
    when a SIGTERM comes (`enable_jit_checkpoint`).
    """

    updates: int = 12
    window: int = 2
    save_every: int = 4
    keep: int = 1
    workers: int = 0
    random: bool = False
    stop: int = 0
    on_sigterm: bool = False
    rows: int = 2
    tokens: int = 16
    samples: int = 24
    width: int = 32
    layers: int = 2
    vocabulary: int = 97

    @property
    def epoch(self) -> int:
        """Micro-batches of an epoch."""
        return self.samples // self.rows

    def model(self) -> GPT2LMHeadModel:
        torch.manual_seed(SEED)
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=self.vocabulary, n_embd=self.width, n_layer=self.layers, n_head=2,
                n_positions=self.tokens, bos_token_id=0, eos_token_id=0, use_cache=False,
            )
        ).train()  # fmt: skip

    def data(self) -> Tokens:
        return Tokens(self)


class Tokens(Dataset[dict[str, Tensor]]):
    """Token ids of a fixed draw; with `Task.random` a quarter of them anew at each reading."""

    def __init__(self, task: Task) -> None:
        draw = torch.Generator().manual_seed(SEED)
        shape = (min(task.samples, 1000), task.tokens)
        self._ids = torch.randint(1, task.vocabulary, shape, generator=draw)
        self._task = task

    def __len__(self) -> int:
        return self._task.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = self._ids[index % len(self._ids)].clone()
        if self._task.random:
            anew = torch.rand(len(ids)) < 0.25
            ids[anew] = torch.randint(1, self._task.vocabulary, (int(anew.sum()),))
        return {"input_ids": ids, "labels": ids.clone()}


def nothing(number: int) -> None:
    """Stands for a hook."""


@dataclass
class Watch:
    """What a run tells whoever looks at it.

    step: called before each micro-batch with its number, from 1. save: called before a checkpoint
    with the updates done. state: the digest of weights and moments as they are; raises where the
    system says that they are not whole. resumed: updates that the run did not have to do.
    """

    step: Callable[[int], None] = nothing
    save: Callable[[int], None] = nothing
    state: Callable[[], str] = field(default=lambda: "")
    resumed: int = 0


class System(Protocol):
    """Runs a task in a folder to its end. Returns the digest of weights and moments."""

    def __call__(self, task: Task, folder: Path, watch: Watch) -> str: ...


def digest(model: nn.Module, moments: Mapping[str, Any]) -> str:
    """The sha256 of weights, buffers and the optimizer's tensors."""
    found = hashlib.sha256()
    for name, tensor in [*sorted(model.state_dict().items()), *_tensors("", moments)]:
        found.update(name.encode())
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _tensors(place: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield place, value
    elif isinstance(value, Mapping):
        for key, inner in sorted(value.items(), key=lambda item: str(item[0])):
            yield from _tensors(f"{place}.{key}", inner)


def run_onward(task: Task, folder: Path, watch: Watch) -> str:
    """`onward.Trainer` in a loop of one's own, with `save`, `resume` and ResumableDataLoader."""
    import onward
    from onward.data import ResumableDataLoader
    from onward.errors import OnwardError

    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = onward.Trainer(
        model, optimizer,
        options={"gradient_accumulation_steps": task.window, "max_grad_norm": 1.0},
    )  # fmt: skip
    scheduler = get_scheduler("linear", optimizer, 1, task.updates)
    loader = ResumableDataLoader(task.data(), task.rows, seed=SEED, num_workers=task.workers)
    trainer.register_for_checkpointing(scheduler, loader)
    torch.manual_seed(SEED)
    if any(folder.glob("checkpoint-*")):
        trainer.resume(folder)
    watch.resumed = trainer.updates

    def state() -> str:
        if trainer.memory.torn:
            raise OnwardError("the Trainer refuses its state")
        return digest(model, trainer.state_dict()["optimizer"])

    def save() -> None:
        watch.save(trainer.updates)
        trainer.save(folder, save_total_limit=task.keep)

    watch.state = state
    done = trainer.updates * task.window + trainer.micro_steps
    while trainer.updates < task.updates:
        for batch in loader:
            done += 1
            watch.step(done)
            updated = trainer.train_step(batch).updated
            if updated:
                scheduler.step()
            if done == task.stop:
                save()
                return state()
            if updated and task.save_every and trainer.updates % task.save_every == 0:
                save()
            if trainer.updates == task.updates:
                break
    return state()


def run_transformers(task: Task, folder: Path, watch: Watch) -> str:
    """transformers' Trainer: `save_steps`, and the checkpoint of `get_last_checkpoint`."""
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class Told(TrainerCallback):
        """Calls the hooks, and stops where the task says so."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.number = state.global_step * task.window + 1
            watch.step(self.number)

        def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            self.number += 1
            watch.step(self.number)

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            if state.global_step * task.window == task.stop:
                control.should_save = control.should_training_stop = True

    class Saving(Trainer):
        """Calls the hook of saves: each begins with the model."""

        def save_model(self, *args: Any, **more: Any) -> None:
            watch.save(self.state.global_step)
            super().save_model(*args, **more)

    model = task.model()
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=task.updates, learning_rate=1e-3, warmup_steps=1,
        lr_scheduler_type="linear", per_device_train_batch_size=task.rows, max_grad_norm=1.0,
        gradient_accumulation_steps=task.window, dataloader_num_workers=task.workers, seed=SEED,
        save_strategy="steps" if task.save_every else "no", save_steps=task.save_every or 500,
        save_total_limit=task.keep, use_cpu=True, report_to="none", logging_strategy="no",
        disable_tqdm=True, dataloader_pin_memory=False, enable_jit_checkpoint=task.on_sigterm,
    )  # fmt: skip
    trainer = Saving(model, arguments, train_dataset=task.data(), callbacks=[Told()])
    last = get_last_checkpoint(str(folder)) if folder.is_dir() else None
    watch.resumed = int(last.rpartition("-")[2]) if last else 0

    def state() -> str:
        optimizer: Any = trainer.optimizer  # None before the first step
        return digest(model, optimizer.state_dict()["state"] if optimizer else {})

    watch.state = state
    trainer.train(resume_from_checkpoint=last)
    return state()


def run_accelerate(task: Task, folder: Path, watch: Watch) -> str:
    """accelerate in the loop of transformers' example that trains without its Trainer: `save_state`
    into `step_<updates>`, `load_state` of the newest, `skip_first_batches`; with a seedable
    sampler."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=task.window,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    )  # fmt: skip
    set_seed(SEED)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = get_scheduler("linear", optimizer, 1, task.updates)
    # without a generator of its own each loop over it moves that of the dropout masks
    own = torch.Generator().manual_seed(SEED)
    loader: Any = DataLoader(
        task.data(), batch_size=task.rows, shuffle=True, num_workers=task.workers, generator=own
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    watch.state = lambda: digest(accelerator.unwrap_model(model), optimizer.state_dict()["state"])
    found = sorted(folder.glob("step_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    updates = 0
    if found:
        accelerator.load_state(str(found[-1]))
        updates = int(found[-1].name.rpartition("_")[2])
    watch.resumed = updates
    done = updates * task.window
    start, skip = divmod(done, len(loader))

    def save(number: int) -> None:
        watch.save(number)
        accelerator.save_state(str(folder / f"step_{number}"))

    for epoch in range(start, -(-task.updates * task.window // len(loader))):
        model.train()
        loader.set_epoch(epoch)
        first = skip if epoch == start else 0
        for batch in accelerator.skip_first_batches(loader, first) if first else loader:
            done += 1
            watch.step(done)
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                updates += 1
                if done == task.stop:
                    save(updates)
                    return watch.state()
                if task.save_every and updates % task.save_every == 0:
                    save(updates)
                if updates == task.updates:
                    break
    return watch.state()


SYSTEMS: dict[str, System] = {
    "Onward": run_onward,
    "transformers": run_transformers,
    "accelerate": run_accelerate,
}
