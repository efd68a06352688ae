"""An optimizer that no graph has steps on the gradients of one graph in transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hf_runs import KINDS, arguments, assert_same_run, clear_lm, language, run
from own_optimizers import Shrinking


def hooked(parameters: Any) -> Any:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    held = [p for p in optimizer.param_groups[0]["params"] if p.requires_grad]

    def signs(*_: Any) -> None:
        for p in held:
            p.grad.sign_()

    optimizer.register_step_pre_hook(signs)
    return optimizer


OPTIMIZERS: dict[str, Any] = {
    "a subclass": lambda p: Shrinking(p, lr=1e-2),
    "another of torch's": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "with a hook": hooked,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("made", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_that_no_graph_has(made: Any, tmp_path: Path) -> None:
    trainers = []
    for kind in KINDS:
        model = clear_lm()
        args = arguments(tmp_path, max_steps=3, gradient_accumulation_steps=2)
        trainer = language(kind, model, args, optimizers=(made(model.parameters()), None))
        trainer.train()
        trainers.append(trainer)
    assert_same_run(*trainers)
    assert stepped_itself(trainers[0])


def stepped_itself(trainer: Any) -> str:
    """Why the optimizer has made its updates itself, on the gradients of one graph."""
    assert trainer.onward_trainer.updates == trainer.state.global_step
    why = trainer.onward_trainer.report()["own_step"]
    assert isinstance(why, str)
    return why


def test_an_optimizer_by_its_name(tmp_path: Path) -> None:
    trainers = run(
        tmp_path, model=clear_lm, max_steps=3, optim="adafactor", gradient_accumulation_steps=2
    )
    assert_same_run(*trainers)
    assert stepped_itself(trainers[0]) == "Adafactor has no update in a graph"


class Moded(Shrinking):
    """An optimizer with a mode, as schedule-free ones have, that steps in training alone."""

    trains = False

    def train(self) -> None:
        self.trains = True

    def eval(self) -> None:
        self.trains = False

    def step(self, closure: Any = None) -> Any:
        assert self.trains
        return super().step(closure)


def test_an_optimizer_that_a_subclass_makes_and_that_has_a_mode(tmp_path: Path) -> None:
    def makes(base: Any) -> Any:
        class Makes(base):
            def create_optimizer(self, *_: Any) -> Any:
                self.optimizer = Moded(self.model.parameters(), lr=1e-2)
                return self.optimizer

        return Makes

    kinds = [makes(kind) for kind in KINDS]
    more = {"eval_strategy": "steps", "eval_steps": 2, "max_steps": 4}
    ours, eager = run(tmp_path, kinds=kinds, model=clear_lm, **more)
    assert_same_run(ours, eager)
    assert stepped_itself(ours) == "Moded has no update in a graph"


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 0), (0, 0)])
def test_an_own_step_goes_on_from_a_checkpoint(first: int, second: int, tmp_path: Path) -> None:
    """A run of either Trainer goes on in the other: the saved state is the optimizer's own."""
    changes: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}

    def made(kind: Any, folder: str) -> Any:
        model = clear_lm()
        optimizers = Shrinking(model.parameters(), lr=1e-2), None
        return language(kind, model, arguments(tmp_path / folder, **changes), optimizers=optimizers)

    whole = made(transformers.Trainer, "whole")
    whole.train()
    made(KINDS[first], "b").train()
    resumed = made(KINDS[second], "b")
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert_same_run(resumed, whole)
