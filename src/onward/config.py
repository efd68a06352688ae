"""Every option, the environment variables, and the error types: typed and documented once."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path


class OnwardError(ValueError):
    """A message for the user: what, where, how to fix. Base of all errors that Onward raises."""


class CaptureError(OnwardError):
    """The model cannot become a graph; the message lists every reason with its module path."""


class MissingExtraError(OnwardError, ImportError):
    """An optional dependency is absent; the message names the extra to install."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; fix: pip install 'onward[{extra}]'")


@dataclass(frozen=True)
class TrainerOptions:
    """Options of `onward.Trainer`.

    gradient_accumulation_steps: micro-batches per optimizer update; each `train_step` is one.
    max_grad_norm: clip gradients to this global 2-norm; None does not clip.
    seed: seed of the dropout masks; None draws from torch's CPU generator at each update.
    verify: compare loss and gradients with eager PyTorch (and stock onnxruntime where installed)
        on the first batch; raises OnwardError where they differ.
    memory_budget: the most a step's plan may hold beyond the user's parameters: bytes (int), or a
        fraction (float, above 0 to 1) of what it would hold unconstrained. Values are then computed
        again in backward instead of kept; OnwardError where that is not enough. None: no limit.
    skip_nonfinite: leave an update out where a gradient is infinite or NaN: weights, optimizer
        state and counts stay as they are, and the step says `skipped`. False updates all the same,
        as eager PyTorch does.
    disable: names of rewrite passes to leave out.
    fetch: names of model outputs every step returns besides the loss.
    """

    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    seed: int | None = None
    verify: bool = False
    memory_budget: int | float | None = None
    skip_nonfinite: bool = True
    disable: tuple[str, ...] = ()
    fetch: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.gradient_accumulation_steps < 1:
            raise OnwardError(
                f"gradient_accumulation_steps={self.gradient_accumulation_steps}; fix: 1 or more"
            )
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise OnwardError(
                f"max_grad_norm={self.max_grad_norm}; fix: a positive number, or None (no clipping)"
            )
        if self.memory_budget is not None and not is_memory_budget(self.memory_budget):
            raise OnwardError(
                f"memory_budget={self.memory_budget}; fix: a value {MEMORY_BUDGET}, or None"
            )


MEMORY_BUDGET = "from 2 (bytes), or above 0.0 to 1.0 (a fraction, with a point)"


def is_memory_budget(value: object) -> bool:
    """Whether a value can be meant: `1` could be all or one byte, so it is neither."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value >= 2 if isinstance(value, int) else 0.0 < value <= 1.0


@dataclass(frozen=True)
class Environment:
    """What the environment asks for. These are all the variables that Onward reads.

    ONWARD_DUMP: folder for the numbered graph after each stage and pass (`.onnx` and text).
    ONWARD_DISABLE: comma-separated names of rewrite passes to leave out.
    ONWARD_CHECK: 1 checks the graph's invariants after every pass. A batch of which only the rows
        that are read are computed runs once more, changing nothing, with NaN in the others; where
        NaN then arrives in the loss or a gradient, OnwardError names what read them.
    ONWARD_NATIVE: 0 leaves the native CPU kernels out; plain, avx2 or avx512 takes that build.
    ONWARD_BLAS: torch, openblas or mkl takes that engine for every matrix product.
    ONWARD_CACHE: folder for what is measured once per machine; default: onward in the user's cache.
    """

    dump: Path | None = None
    disable: tuple[str, ...] = field(default=())
    check: bool = False
    native: str = ""
    blas: str = ""
    cache: Path = Path(".cache")


def environment() -> Environment:
    """Reads the variables afresh, so that a test or a notebook can change them."""
    dump = os.environ.get("ONWARD_DUMP")
    disable = os.environ.get("ONWARD_DISABLE", "")
    return Environment(
        dump=Path(dump) if dump else None,
        disable=tuple(name for name in disable.split(",") if name),
        check=os.environ.get("ONWARD_CHECK", "0") == "1",
        native=os.environ.get("ONWARD_NATIVE", ""),
        blas=os.environ.get("ONWARD_BLAS", ""),
        cache=_cache_folder(),
    )


def _cache_folder() -> Path:
    own, shared = os.environ.get("ONWARD_CACHE"), os.environ.get("XDG_CACHE_HOME")
    if own:
        return Path(own)
    return (Path(shared) if shared else Path.home() / ".cache") / "onward"
