"""A program trained by transformers' Trainer and by Onward's in its place.

A history becomes a run: its batches the data, one after the other; what happens in between happens
in a callback, which also looks at both sides after each update.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from typing import Any

import torch
import transformers
from fuzz.engines import Moment, Side, Tensors
from fuzz.maker import Case
from torch import nn

from onward.integrations.transformers import Trainer

IN_BETWEEN = ("eval", "save", "code")


def fits(case: Case) -> bool:
    """Whether transformers' Trainer can run what the case says."""
    return not (case["loss_fn"] or case["dropout"] or case["call"] == "positions") and all(
        a["do"] in ("train", *IN_BETWEEN, "reload", "rebirth") for a in case["history"]
    )


def with_outputs(case: Case) -> Case:
    """The case with a loss among named results, where transformers looks for it."""
    outputs = case["outputs"] or {"of_loss": case["loss"]}
    return case | {"outputs": outputs, "fetch": [], "wrap": "", "scheduler": ""}


class Led(Side):
    """A run of one of the two."""

    def __init__(self, case: Case, defined: dict[str, Any], dtype: torch.dtype, kind: type) -> None:
        super().__init__(case, defined, dtype)
        self.kind = kind

    def play(self) -> list[Moment]:
        torch.manual_seed(self.case["seed"])
        window = self.case["options"]["gradient_accumulation_steps"]
        train: list[dict[str, Any]] = []
        between: dict[int, list[dict[str, Any]]] = {}
        for action in self.case["history"]:
            if action["do"] == "train" and "spoil" not in action:
                train.append({k: v for k, v in action.items() if k not in ("alias", "input")})
            elif action["do"] in IN_BETWEEN and len(train) % window == 0:
                between.setdefault(len(train) // window, []).append(action)
        limit = self.case["options"]["max_grad_norm"]
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            args = transformers.TrainingArguments(
                output_dir=folder, use_cpu=True, max_steps=len(train) // window, logging_steps=1,
                per_device_train_batch_size=1, per_device_eval_batch_size=1, report_to="none",
                disable_tqdm=True, save_strategy="no", log_level="error",
                dataloader_pin_memory=False, remove_unused_columns=False,
                gradient_accumulation_steps=window, max_grad_norm=limit or 0.0,
                prediction_loss_only=True, label_names=[next(iter(self.defined["batch_0"]))],
                seed=self.case["seed"] % 1000, logging_nan_inf_filter=False,
            )  # fmt: skip
            schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda k: 1 / (1 + k))
            watch = Watch(self, between, folder)
            trainer = self.kind(
                self.model, args, data_collator=self.collate, train_dataset=InOrder(train),
                optimizers=(self.optimizer, schedule), callbacks=[watch],
            )  # fmt: skip
            trainer.remove_callback(transformers.PrinterCallback)
            trainer.get_train_dataloader = lambda: self.loader(train)
            watch.trainer = trainer
            trainer.train()
        losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
        for moment, loss in zip(watch.moments, losses, strict=True):
            moment.said["loss"] = torch.tensor(loss, dtype=torch.float64)
        return watch.moments

    def collate(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        return dict(self.batch(items[0]))

    def loader(self, train: list[dict[str, Any]]) -> torch.utils.data.DataLoader[Any]:
        """In order, whatever a sampler would draw."""
        return torch.utils.data.DataLoader(
            InOrder(train), batch_size=1, shuffle=False, collate_fn=self.collate
        )


class InOrder(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, items: list[dict[str, Any]]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.items[i]


class Watch(transformers.TrainerCallback):
    """Looks at a side after each update, and does what happens in between."""

    def __init__(self, side: Led, between: dict[int, list[dict[str, Any]]], folder: str) -> None:
        self.side, self.between, self.folder = side, between, folder
        self.moments: list[Moment] = []
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        moment = Moment(state=self.side.state())
        for action in self.between.get(state.global_step, []):
            said = self.done(action, len(self.moments))
            moment.said |= said
        moment.generator = torch.get_rng_state().numpy().tobytes()
        self.moments.append(moment)

    def done(self, action: dict[str, Any], at: int) -> Tensors:
        if action["do"] == "save":
            self.trainer.save_model(f"{self.folder}/saved")
        elif action["do"] == "code":
            names = {
                "model": self.side.model, "optimizer": self.side.optimizer, "nn": nn,
                "copy": copy, "torch": torch,
            }  # fmt: skip
            if "scheduler" not in action["code"]:
                exec(action["code"], names)
        else:
            found = self.trainer.evaluate(InOrder([action]))
            return {f"eval_loss {at}": torch.tensor(found["eval_loss"], dtype=torch.float64)}
        return {}


STOCK, OURS = transformers.Trainer, Trainer
