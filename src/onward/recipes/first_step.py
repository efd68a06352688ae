"""Runs a training script until its first training step with Onward is done.

Everything before that step runs, with all its effects; nothing after it does.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from onward.errors import OnwardError
from onward.module.accelerate import Accelerated
from onward.module.run import CallRun
from onward.recipes.options import InputError
from onward.train import Trainer


class FirstStep(BaseException):
    """Ends the script; a BaseException, since the script may catch exceptions. owner: the Trainer,
    or the accelerated model. reason: why a call of such a model runs in eager PyTorch."""

    def __init__(self, owner: Trainer | torch.nn.Module, reason: str | None = None) -> None:
        super().__init__("the first training step is done")
        self.owner, self.reason = owner, reason


def first_step(path: Path, arguments: Sequence[str]) -> FirstStep:
    """Runs the script as `python path arguments` would, with its output on stderr. Raises
    OnwardError if it exits or fails before a training step."""
    if not path.is_file():
        raise InputError(f"no such script {str(path)!r}", "as MODEL_OR_SCRIPT", "name one")
    try:
        with _as_program(path, arguments), _stopped(), contextlib.redirect_stdout(sys.stderr):
            runpy.run_path(str(path), run_name="__main__")
    except FirstStep as found:
        return found
    except SystemExit as end:
        raise InputError(
            f"{path.name} ended (exit status {end.code or 0}) before a training step",
            "as MODEL_OR_SCRIPT",
            "give the script's own options after --",
        ) from end
    except OnwardError:
        raise
    except Exception as error:
        raise failed(error, path.name) from error
    raise InputError(
        f"{path.name} made no training step with onward.Trainer or an accelerated model",
        "as MODEL_OR_SCRIPT",
        "name a script that trains, or module.py:function that returns a model and a batch",
    )


def failed(error: Exception, where: str) -> OnwardError:
    """The one-line error for an exception in the user's code, with the line that raised it."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).name == where
    ]
    line = f", line {frames[-1].lineno}" if frames else ""
    what = (str(error).strip().splitlines() or [""])[0]
    return InputError(
        f"{type(error).__name__}: {what}", f"in {where}{line}", "run it by itself first"
    )


@contextlib.contextmanager
def _as_program(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    before = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.absolute().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before


@contextlib.contextmanager
def _stopped() -> Iterator[None]:
    """A context in which the first training step (a `train_step`, or a backward of an accelerated
    model) raises FirstStep when it is done."""
    step, call, backward = Trainer.train_step, Accelerated._as_graph, CallRun.backward
    in_eager = Accelerated._in_eager
    models: dict[int, torch.nn.Module] = {}  # by id of the prepared call

    def train_step(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        step(self, *args, **kwargs)
        raise FirstStep(self)

    def run(self: Accelerated, model: torch.nn.Module, batch: Any, mode: Any) -> Any:
        outputs = call(self, model, batch, mode)
        models[id(self._last)] = model
        return outputs

    def run_backward(self: CallRun, *args: Any) -> Any:
        backward(self, *args)
        raise FirstStep(models[id(self.call)])

    def run_in_eager(
        self: Accelerated, model: torch.nn.Module, args: Any, kwargs: Any, reason: str
    ) -> Any:
        if model.training and torch.is_grad_enabled():
            raise FirstStep(model, reason)
        return in_eager(self, model, args, kwargs, reason)

    replaced: list[tuple[Any, str, Any, Any]] = [
        (Trainer, "train_step", step, train_step),
        (Accelerated, "_as_graph", call, run),
        (CallRun, "backward", backward, run_backward),
        (Accelerated, "_in_eager", in_eager, run_in_eager),
    ]
    for owner, name, _, ours in replaced:
        setattr(owner, name, ours)
    try:
        yield
    finally:
        for owner, name, plain, _ in replaced:
            setattr(owner, name, plain)


__all__ = ["FirstStep", "failed", "first_step"]
