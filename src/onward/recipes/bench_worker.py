"""The process of one engine in `onward bench`: it builds the model, and makes steps when it is told
to. Every such process imports the same libraries before its memory is read, so that no engine is
charged for what another one was spared. Times are seconds, sizes bytes."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import onward
from onward.errors import OnwardError, one_line
from onward.recipes.bench_options import BENCH_ENGINES, BenchEngine
from onward.recipes.options import InputError

LEARNING_RATE = 5e-5
_IMPORTED = (
    "torch._dynamo", "torch._inductor", "torch.export", "transformers", "onnx", "onnxruntime",
)  # fmt: skip
_DROPOUTS = (
    torch.nn.Dropout, torch.nn.Dropout1d, torch.nn.Dropout2d, torch.nn.Dropout3d,
    torch.nn.AlphaDropout, torch.nn.FeatureAlphaDropout,
)  # fmt: skip
Call = tuple[tuple[Any, ...], dict[str, Any]]


class BenchSession:
    """A model, its batches and its step under one engine.

    random: whether the model draws dropout masks. Raises InputError for a model without a loss.
    """

    def __init__(
        self,
        engine: BenchEngine,
        precision: str,
        target: str,
        sizes: tuple[int | None, int | None],
        batches: int,
        dropout: bool = True,
    ) -> None:
        torch.manual_seed(0)
        self.engine, self.low = engine, precision == "bf16"
        self.model, self.batches = model_and_batches(target, sizes, batches)
        self.model.train()
        if not dropout:
            without_dropout(self.model)
        self.random = draws_masks(self.model)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE, fused=engine.fused or None)
        self.forward: Any = self.model
        self.trainer: onward.Trainer | None = None

    def attach(self) -> None:
        """Hands the model to the engine: what this costs belongs to its first step."""
        if self.engine.name == "onward":
            options = {"mixed_precision": "bf16"} if self.low else {}
            self.trainer = onward.Trainer(self.model, self.optimizer, options=options)
        elif self.engine.compiled:
            torch.compiler.reset()
            self.forward = torch.compile(self.model)

    def step(self, call: Call) -> float:
        """One training step; returns the loss."""
        args, kwargs = call
        if self.trainer is not None:
            return self.trainer.train_step(*args, **kwargs).loss.item()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.low):
            loss = loss_of(self.forward(*args, **kwargs))
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def timed(self, start: int, count: int) -> dict[str, list[float]]:
        """The seconds and losses of steps on batches from number `start`."""
        seconds, losses = list[float](), list[float]()
        for call in self.batches[start : start + count]:
            begin = time.perf_counter()
            losses.append(self.step(call))
            seconds.append(time.perf_counter() - begin)
        return {"seconds": seconds, "losses": losses}


def model_and_batches(
    target: str, sizes: tuple[int | None, int | None], batches: int
) -> tuple[torch.nn.Module, list[Call]]:
    """The model, and so many calls of it. Those of a model by name are drawn; those of a function
    are its one batch with rows that change places, whose loss is that batch's."""
    from onward.recipes.example_models import example, example_batch
    from onward.recipes.explain import made_by_function

    if ":" not in target:
        model, first = example(target, *sizes)
        drawn = [
            first,
            *(example_batch(type(model), model.config, *sizes) for _ in range(batches - 1)),
        ]
        return model, [((), dict(batch)) for batch in drawn]
    model, args, kwargs = made_by_function(target)
    if not isinstance(model, torch.nn.Module):
        raise InputError(
            "the function returns a Trainer", "as MODEL_OR_SCRIPT", "return the model and a batch"
        )
    return model, [_turned((args, kwargs), number) for number in range(batches)]


def _turned(call: Call, by: int) -> Call:
    """A copy of a call whose rows are turned by so many places. Tensors have as many rows as the
    first one; others stay."""
    from torch.utils import _pytree as pytree

    leaves, spec = pytree.tree_flatten(call)
    rows = next((x.shape[0] for x in leaves if isinstance(x, torch.Tensor) and x.dim()), 0)
    turned = [
        x.roll(by, 0).clone()
        if isinstance(x, torch.Tensor) and x.dim() and x.shape[0] == rows
        else x
        for x in leaves
    ]
    return pytree.tree_unflatten(turned, spec)


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model returns: a scalar, or one named or first in it. Raises InputError
    where there is none."""
    found = output
    if isinstance(output, Mapping):
        found = output.get("loss")
    elif not isinstance(output, torch.Tensor):
        found = getattr(output, "loss", None)
        if found is None and isinstance(output, Sequence) and output:
            found = output[0]
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise InputError(
            f"the model returns no loss but a {type(output).__name__}",
            "as MODEL_OR_SCRIPT",
            "return the loss, or an output with one, from its forward",
        )
    return found


def _dropouts(model: torch.nn.Module) -> list[tuple[torch.nn.Module, str]]:
    """The attributes of modules that are dropout probabilities above 0."""
    found: list[tuple[torch.nn.Module, str]] = []
    for module in model.modules():
        names = [n for n, v in vars(module).items() if isinstance(v, float) and v > 0]
        own = "p" if isinstance(module, _DROPOUTS) else ""
        found += [(module, name) for name in names if "drop" in name or name == own]
    return found


def draws_masks(model: torch.nn.Module) -> bool:
    """Whether some dropout of the model is on."""
    return bool(_dropouts(model))


def without_dropout(model: torch.nn.Module) -> None:
    """Sets every dropout probability of the model to 0."""
    for module, name in _dropouts(model):
        setattr(module, name, 0.0)


# ---- memory


def _status(key: str) -> int | None:
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:  # not Linux
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(key)), None)


def memory_in_use() -> int | None:
    """The resident set, without freed heap, which would serve the first tensors unseen."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def begin_peak() -> bool:
    """Starts a new peak; false where the kernel has no such thing."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


# ---- the engine's end of the pipe


class BenchWorker:
    """What the process of an engine does, one message after another."""

    def __init__(self) -> None:
        self.session: BenchSession | None = None
        self._made: tuple[BenchEngine, str, str, tuple[int | None, int | None]] | None = None
        self._base: int | None = None
        self._has_peak = False

    def prepare(
        self,
        engine: str,
        precision: str,
        target: str,
        sizes: list[int | None],
        batches: int,
        warmup: int,
    ) -> dict[str, Any]:
        """Builds the model, makes the first step, and steps that are not timed."""
        for name in _IMPORTED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        self._made = (BENCH_ENGINES[engine], precision, target, (sizes[0], sizes[1]))
        session = self.session = BenchSession(*self._made, batches=batches)
        self._base = memory_in_use()
        begin = time.perf_counter()
        session.attach()
        loss = session.step(session.batches[0])
        first = time.perf_counter() - begin
        warm = session.timed(1, warmup)
        self._has_peak = begin_peak()
        losses = [loss, *warm["losses"]]
        return {"first_step_s": first, "losses": losses, "random": session.random}

    def run(self, start: int, count: int) -> dict[str, Any]:
        """Timed steps, and the highest memory of steps since the warm-up, less that before the
        first one."""
        assert self.session is not None, "prepare comes first"
        found: dict[str, Any] = self.session.timed(start, count)
        peak = _status("VmHWM") if self._has_peak else None
        known = peak is not None and self._base is not None
        return {**found, "step_bytes": peak - self._base if known else None}  # type: ignore[operator]

    def exact(self, steps: int) -> dict[str, Any]:
        """The losses of a fresh model without dropout."""
        self.session = None
        gc.collect()
        assert self._made is not None, "prepare comes first"
        session = BenchSession(*self._made, batches=steps, dropout=False)
        session.attach()
        return {"losses": session.timed(0, steps)["losses"]}


def serve() -> int:
    """Answers the messages on stdin, JSON in lines, until it ends. What the model prints goes to
    stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    from transformers.utils import logging

    from onward.kernels.quota import follow_quota

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    follow_quota()
    worker = BenchWorker()
    for line in sys.stdin:
        name, arguments = json.loads(line)
        try:
            answer = getattr(worker, name)(*arguments)
        except Exception as error:  # an engine may raise anything: it is a line of the table
            kind = "" if isinstance(error, OnwardError) else f"{type(error).__name__}: "
            answer = {"error": one_line(f"{kind}{error}", 400)}
        print(json.dumps(answer), file=answers, flush=True)
    return 0


__all__ = ["BenchSession", "BenchWorker", "loss_of", "model_and_batches", "serve"]
