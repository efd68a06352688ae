"""The trainer of each engine: Onward's, and eager PyTorch beside it with the same methods."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from onward.checkpoint import folder_name, rotate, unwritten
from onward.model_state.device import device_of
from onward.recipes.devices import moved
from onward.recipes.options import FinetuneConfig
from onward.recipes.trainer_switches import precision, trainer_options
from onward.train import StepResult, Trainer
from onward.train.checkpointing import (
    Stateful,
    random_part,
    read_newest,
    registered_part,
    take_checkpoint,
)
from onward.train.state import model_part
from onward.train.state_part import StatePart, restore

if TYPE_CHECKING:
    from transformers import PreTrainedModel


_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


class EagerTrainer:
    """Eager PyTorch in a typical training loop, with those methods of `onward.Trainer` that the
    loop of a run calls.

    updates: optimizer updates done. device: of the model's parameters, where batches are moved.
    """

    def __init__(
        self, model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: FinetuneConfig
    ) -> None:
        if config.gradient_checkpointing:
            # the second is transformers' older name
            names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
            enable = next(found for name in names if (found := getattr(model, name, None)))
            enable({"use_reentrant": False})
        self.model = model
        self.optimizer = optimizer
        self.updates = 0
        self.accumulate = config.gradient_accumulation_steps
        self.max_grad_norm, self.low = config.max_grad_norm, _LOW.get(precision(config))
        self.device = device_of(model)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.low == torch.float16)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self._micro_steps = 0
        self._registered: list[Stateful] = []
        self._run_id = secrets.token_hex(8)

    def train_step(self, batch: Mapping[str, torch.Tensor], share: float) -> StepResult:
        """Runs one micro-batch; the last of a window makes the update. share: of the labels of the
        window, which a mean over all of them weighs the batch by. See
        `onward.Trainer.train_step`."""
        if not self._micro_steps:
            self.model.train()
        with self._precision():
            loss = self.model(**moved(batch, self.device)).loss
        self.scaler.scale(loss * share).backward()  # type: ignore[union-attr]
        self._micro_steps += 1
        lr = float(self.optimizer.param_groups[0]["lr"])
        if self._micro_steps < self.accumulate:
            return StepResult(loss.detach(), lr=lr, updated=False)
        self._micro_steps = 0
        norm = None
        if self.max_grad_norm is not None:
            self.scaler.unscale_(self.optimizer)
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.max_grad_norm)
        before = self.scaler.get_scale()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        skipped = self.scaler.get_scale() < before
        self.updates += not skipped
        self.optimizer.zero_grad(set_to_none=True)
        return StepResult(loss.detach(), norm, lr, skipped=skipped, updated=not skipped)

    @torch.no_grad()
    def eval_step(self, batch: Mapping[str, torch.Tensor], fetch: Sequence[str] = ()) -> StepResult:
        """Computes the mean loss, without dropout, over the labels of a batch, and the outputs
        named by `fetch`."""
        self.model.eval()
        with self._precision():
            found = self.model(**moved(batch, self.device))
        outputs = {name: found[name] for name in fetch}
        return StepResult(found.loss.detach(), updated=False, outputs=outputs)

    def register_for_checkpointing(self, *objects: Stateful) -> None:
        """Adds objects whose `state_dict` goes into checkpoints."""
        self._registered += objects

    def save(
        self, output_dir: Path, *, save_total_limit: int | None = None, keep: Sequence[Path] = ()
    ) -> Path:
        """Writes a checkpoint, between two updates; returns its folder. keep: others that are not
        removed. Raises CheckpointError where the disk fails."""
        path = output_dir / folder_name(self.updates, 0)
        packed = take_checkpoint(self.model, self._parts(), self._run_id, self.updates, 0).packed()
        try:
            packed.write(path)
            if save_total_limit is not None:
                rotate(output_dir, path, save_total_limit, keep)
        except OSError as error:
            raise unwritten(path, error) from error
        return path

    def resume(self, folder: Path) -> Path:
        """Goes on from a checkpoint, or from the newest in a folder that is whole; returns it.
        Raises CheckpointError where there is none, and OnwardError where it does not fit."""
        path, found = read_newest(folder, strict=False)
        restore(self._parts(), {**found.state, "model": found.model.state_dict()})
        self._run_id, self.updates = str(found.facts["run"]), int(found.facts["updates"])
        return path

    def load_weights(self, folder: Path) -> Path:
        """Gives the model the weights of a checkpoint; returns it. Raises what `resume` raises."""
        path, found = read_newest(folder, strict=False)
        restore((model_part(self.model),), {**found.state, "model": found.model.state_dict()})
        return path

    def _parts(self) -> tuple[StatePart, ...]:
        objects = [*self._registered, self.optimizer, self.scaler]
        return random_part(), registered_part(objects), model_part(self.model)

    def _precision(self) -> torch.autocast:
        low = self.low or torch.bfloat16
        return torch.autocast(self.device.type, low, enabled=self.low is not None)


LoopTrainer = Trainer | EagerTrainer


def onward_trainer(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, config: FinetuneConfig
) -> Trainer:
    """The Trainer of a run: the whole step is one graph, captured at the first update."""
    model.train()
    return Trainer(model, optimizer=optimizer, options=trainer_options(config))


TrainerFactory = Callable[["PreTrainedModel", torch.optim.Optimizer, FinetuneConfig], LoopTrainer]
ENGINES: dict[str, TrainerFactory] = {"onward": onward_trainer, "torch": EagerTrainer}
