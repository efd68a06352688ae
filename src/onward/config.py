"""Every option, the environment variables, and the error types: typed and documented once."""

from __future__ import annotations

import dataclasses
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any


class OnwardError(ValueError):
    """A message for the user: what, where, how to fix. Base of all errors that Onward raises."""


class CaptureError(OnwardError):
    """The model cannot become a graph; the message lists every reason with its module path.

    places: paths of the modules that it is about, where these are known. said: the message without
    its place, where it has one.
    """

    places: tuple[str, ...] = ()
    said: str = ""


class RegionError(CaptureError):
    """A part of a model that runs in PyTorch within its graph has given something else than the
    graph was made for."""


class EagerWarning(UserWarning):
    """An accelerated model runs in eager PyTorch where it was to run as a graph; says why."""


class MissingExtraError(OnwardError, ImportError):
    """An optional dependency is absent; the message names the extra to install."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; fix: pip install 'onward[{extra}]'")


@dataclass(frozen=True)
class LossScale:
    """The rule by which the loss scale of fp16 moves; names and defaults are those of
    `torch.amp.GradScaler`. A value that cannot be meant raises OnwardError here.

    init_scale: what the loss is multiplied by at first. growth_factor: what the scale is multiplied
    by after `growth_interval` updates in a row whose gradients were finite. backoff_factor: the
    same after an update that was left out because a gradient was infinite or NaN.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000

    def __post_init__(self) -> None:
        limits = {
            "init_scale": (LEAST_SCALE, 1 / LEAST_SCALE, "a number from 2**-126 to 2**126"),
            "growth_factor": (
                math.nextafter(1.0, 2.0), 1 / LEAST_SCALE, "a number above 1, to 2**126"
            ),
            "backoff_factor": (
                LEAST_SCALE, math.nextafter(1.0, 0.0), "a number from 2**-126 to below 1"
            ),
        }  # fmt: skip
        for name, (least, most, words) in limits.items():
            number = _real(getattr(self, name))
            if number is None or not least <= number <= most:
                raise _refuse(f"loss_scale: {name}", getattr(self, name), words)
            object.__setattr__(self, name, number)
        interval = _steps("loss_scale: growth_interval", self.growth_interval)
        object.__setattr__(self, "growth_interval", interval)


LEAST_SCALE = 2.0**-126  # the least normal f32


@dataclass(frozen=True)
class TrainerOptions:
    """Options of `onward.Trainer`. A value that cannot be meant raises OnwardError here.

    gradient_accumulation_steps: micro-batches per optimizer update; each `train_step` is one.
    max_grad_norm: clip gradients to this global 2-norm; None does not clip.
    seed: seed of the dropout masks, and of the rounding of moments in bf16; None has them
        follow from `torch.manual_seed` and the number of the update.
    verify: compare loss and gradients with eager PyTorch (and stock onnxruntime where installed)
        on the first batch; raises OnwardError where they differ.
    memory_budget: the most that a step's plan may hold beyond the user's parameters. Values are
        then computed again in backward instead of kept. Bytes (`2_000_000_000`, "2GB", "1.5 GiB"):
        OnwardError, which names the least that can be had, where they are too few. Or a fraction
        (float, above 0.0 to 1.0) of what recomputing can spare: 1.0 recomputes nothing, 0.5 takes
        half of the way to the least that can be had, and near 0.0 is that least. It is never
        refused: what no recomputing spares (optimizer state, gradients that wait for their update)
        is not counted in it. None: no limit.
    strict: raise CaptureError, with every reason, where a part of the model cannot be captured;
        otherwise that part runs in PyTorch within the graph, and an EagerWarning says which and
        why.
    skip_nonfinite: leave an update out where a gradient is infinite or NaN: weights, optimizer
        state and counts stay as they are, and the step says `skipped`. False updates all the same,
        as eager PyTorch does.
    mixed_precision: "bf16" computes matrix products, attention and activations in bfloat16, as
        `torch.autocast` does: weights, optimizer state, norms' statistics, softmax, losses and
        sums over a batch stay fp32. "fp16": the same in float16, whose range needs a loss scale.
        "auto": bf16 where the processor multiplies bf16 itself, else fp32. "no": fp32.
    loss_scale: of fp16 alone: what the loss is multiplied by for backward, and gradients divided by
        before they are clipped and applied, so that small ones do not become 0. "dynamic" goes by
        the rule and the numbers of `torch.amp.GradScaler`; a LossScale, or a dict of its fields, by
        the same rule with other numbers; a number stays as it is. Needs `skip_nonfinite`, unless it
        is a number.
    optimizer_state: "bf16" or "8bit" keeps the moments of Adam and AdamW in 4 or 2.03 bytes a
        weight instead of 8. bf16 is rounded up or down by chance, without bias and by the seed. 8
        bits are codes in blocks of 256; parameters of fewer than 4096 elements and embeddings stay
        fp32. "fp32": as the weights.
    gradient_accumulation_dtype: "bf16" keeps the sums of a window's gradients in 2 bytes a weight
        instead of 4, each micro-batch's rounded once; the last sum, which the update reads, is not.
        "fp32": as the weights.
    keep_in_fp32: module paths and op names whose ops stay fp32 in mixed precision, as patterns of a
        shell ("decoder.*", "lm_head", "Conv"); a string is one pattern.
    disable: names of rewrite passes to leave out, and `row_demand`; a string is one name, or
        several with commas.
    fetch: names of model outputs every step returns besides the loss; a string is one name.
    """

    gradient_accumulation_steps: int = 1
    max_grad_norm: float | None = None
    seed: int | None = None
    verify: bool = False
    memory_budget: int | float | str | None = None
    skip_nonfinite: bool = True
    strict: bool = False
    mixed_precision: str = "no"
    loss_scale: float | str | Mapping[str, Any] | LossScale = "dynamic"
    optimizer_state: str = "fp32"
    gradient_accumulation_dtype: str = "fp32"
    keep_in_fp32: Sequence[str] = ()
    disable: Sequence[str] = ()
    fetch: Sequence[str] = ()

    def __post_init__(self) -> None:
        for field_ in dataclasses.fields(self):
            read = _READERS[field_.name]
            object.__setattr__(self, field_.name, read(field_.name, getattr(self, field_.name)))
        if self.mixed_precision != "fp16" and self.loss_scale != LossScale():
            raise OnwardError(
                f"loss_scale is for fp16 only, but mixed_precision={self.mixed_precision!r}; "
                'fix: leave loss_scale out, or mixed_precision="fp16"'
            )
        if isinstance(self.scaling, LossScale) and not self.skip_nonfinite:
            raise OnwardError(
                "skip_nonfinite=False contradicts a dynamic loss_scale, which skips updates "
                "with infinite gradients to find its scale; fix: skip_nonfinite=True, or a "
                "number as loss_scale"
            )

    @property
    def scaling(self) -> float | LossScale | None:
        """The scale of the loss: a rule, or a fixed number; None where nothing does."""
        if self.mixed_precision != "fp16":
            return None
        assert isinstance(self.loss_scale, float | LossScale), "as it was read"
        return self.loss_scale

    @classmethod
    def of(cls, options: TrainerOptions | Mapping[str, Any] | None) -> TrainerOptions:
        """The options as given, the options of a mapping, or the defaults for None."""
        if options is None:
            return cls()
        if isinstance(options, cls):
            return options
        if not isinstance(options, Mapping):
            raise OnwardError(
                f"options is {_shown(options)}; fix: an onward.TrainerOptions, or a dict of its "
                "fields"
            )
        known = [f.name for f in dataclasses.fields(cls)]
        check_names("options", "option", [str(name) for name in options], known)
        return cls(**options)


@dataclass(frozen=True)
class ModuleOptions:
    """Options of `onward.accelerate` and `onward.Module`. A value that cannot be meant raises
    OnwardError here.

    outputs: "auto" computes what the calls before have read, where the outputs' class can wait (a
    Hugging Face ModelOutput): another one is computed when it is read, by a second run of the
    forward. "all" computes every output in each call. "loss" computes the loss alone; other outputs
    are None.
    strict: raise CaptureError where a call cannot run as a graph; otherwise parts of the model that
        cannot be captured, or the whole call, run in eager PyTorch, and an EagerWarning says which
        and why, once.
    memory_budget: as of TrainerOptions, for a call's forward and backward.
    disable: as of TrainerOptions.
    """

    outputs: str = "auto"
    strict: bool = False
    memory_budget: int | float | str | None = None
    disable: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.outputs not in _OUTPUTS:
            raise _refuse("outputs", self.outputs, f"one of {', '.join(map(repr, _OUTPUTS))}")
        for name in ("strict", "memory_budget", "disable"):
            object.__setattr__(self, name, _READERS[name](name, getattr(self, name)))


_OUTPUTS = ("auto", "all", "loss")


def check_names(where: str, kind: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises one OnwardError for all names that are not known, each with those it resembles."""
    strange = [name for name in dict.fromkeys(given) if name not in known]
    if not strange:
        return
    told: list[str] = []
    resembled = False
    for name in strange:
        close = get_close_matches(name, known, n=3, cutoff=0.6)
        resembled = resembled or bool(close)
        told.append(f"{name!r}" + (f" (did you mean {' or '.join(close)}?)" if close else ""))
    raise OnwardError(
        f"unknown {kind} in {where}: {', '.join(told)}; fix: any of {', '.join(sorted(known))}"
    )


# ---- what one option may be

Reader = Callable[[str, Any], Any]


def _refuse(name: str, value: object, fix: str) -> OnwardError:
    return OnwardError(f"{name}={_shown(value)} is invalid; fix: {fix}")


def _shown(value: object) -> str:
    """A value as an error's line shows it: short, and of a large object only what it is."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{type(value).__name__}(...)"


def _whole(value: object) -> int | None:
    """Reads a whole number, numpy's too, as int; None for all else, booleans among it."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return int(value)


def _steps(name: str, value: object) -> int:
    number = _whole(value)
    if number is None or number < 1:
        raise _refuse(name, value, "a whole number, 1 or more")
    return number


def _norm(name: str, value: object) -> float | None:
    if value is None:
        return None
    number = _real(value)
    if number is None or number <= 0:
        raise _refuse(name, value, "a positive number, or None (no clipping)")
    return number


def _real(value: object) -> float | None:
    """Reads a finite number, numpy's too, as float; None for all else, booleans among it."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        return None
    return float(value)


def _seed(name: str, value: object) -> int | None:
    if value is None:
        return None
    number = _whole(value)
    if number is None or not 0 <= number < 2**64:
        raise _refuse(name, value, "a whole number from 0 to 2**64 - 1, or None")
    return number


def _switch(name: str, value: object) -> bool:
    if type(value).__name__ not in ("bool", "bool_"):  # Python's and numpy's
        raise _refuse(name, value, "True or False")
    return bool(value)


def read_names(name: str, value: object, commas: bool = False) -> tuple[str, ...]:
    """Reads names as a tuple, each once; a string is one name, or with `commas` several."""
    if isinstance(value, str):
        parts = [part.strip() for part in value.split(",")] if commas else [value.strip()]
        if commas or all(parts):
            return tuple(dict.fromkeys(part for part in parts if part))
    if not isinstance(value, Iterable) or isinstance(value, str | Mapping | bytes):
        raise _refuse(name, value, "a name, or a list of names")
    found = list(value)
    strange = [x for x in found if not isinstance(x, str) or not x]
    if strange:
        raise OnwardError(f"{name} holds {_shown(strange[0])}; fix: give names as strings")
    return tuple(dict.fromkeys(found))


def _budget(name: str, value: object) -> int | float | str | None:
    if value is None:
        return None
    if memory_amount(value) is None:
        raise _refuse(name, value, f"a value {MEMORY_BUDGET}, or None")
    return value  # type: ignore[return-value]


def _precision(name: str, value: object) -> str:
    if value is None or value is False:
        return "no"
    if value not in PRECISIONS:
        raise _refuse(name, value, f"one of {', '.join(map(repr, PRECISIONS))}")
    return str(value)


PRECISIONS = ("no", "bf16", "fp16", "auto")


def _loss_scale(name: str, value: object) -> float | LossScale:
    if isinstance(value, LossScale):
        return value
    if isinstance(value, str) and value == "dynamic":
        return LossScale()
    if isinstance(value, Mapping):
        known = [f.name for f in dataclasses.fields(LossScale)]
        check_names(name, "setting", [str(key) for key in value], known)
        return LossScale(**value)
    number = _real(value)
    if number is None or not LEAST_SCALE <= number <= 1 / LEAST_SCALE:
        fix = '"dynamic", a number from 2**-126 to 2**126, or an onward.LossScale'
        raise _refuse(name, value, fix)
    return number


def _state_form(name: str, value: object) -> str:
    if not isinstance(value, str) or value not in STATES:
        raise _refuse(name, value, f"one of {', '.join(map(repr, STATES))}")
    return value


STATES = ("fp32", "bf16", "8bit")


def _sums(name: str, value: object) -> str:
    if not isinstance(value, str) or value not in SUMS:
        raise _refuse(name, value, f"one of {', '.join(map(repr, SUMS))}")
    return value


SUMS = ("fp32", "bf16")

_READERS: dict[str, Reader] = {
    "gradient_accumulation_steps": _steps,
    "max_grad_norm": _norm,
    "seed": _seed,
    "verify": _switch,
    "memory_budget": _budget,
    "skip_nonfinite": _switch,
    "strict": _switch,
    "mixed_precision": _precision,
    "loss_scale": _loss_scale,
    "optimizer_state": _state_form,
    "gradient_accumulation_dtype": _sums,
    "keep_in_fp32": read_names,
    "disable": lambda name, value: read_names(name, value, commas=True),
    "fetch": read_names,
}

MEMORY_BUDGET = (
    "in bytes (2 or more), or with a unit ('2GB', '512MiB', '1.5 GiB'), or a fraction as a "
    "float (above 0.0, up to 1.0)"
)
_UNITS = {"b": 1} | {
    f"{letter}{kind}": size ** (power + 1)
    for power, letter in enumerate("kmgt")
    for kind, size in (("b", 1000), ("ib", 1024))
}
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]+)\s*", re.IGNORECASE)


def memory_amount(value: object) -> int | float | None:
    """Reads a budget as bytes (int) or fraction (float); None where it cannot be meant.

    `1` could be all or one byte, so it is neither.
    """
    if isinstance(value, str):
        match = _AMOUNT.fullmatch(value)
        unit = _UNITS.get(match[2].lower()) if match else None
        number = None if match is None or unit is None else int(float(match[1]) * unit)
        return None if number is None or number < 2 else number
    number = _whole(value)
    if number is not None:
        return number if number >= 2 else None
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    share = float(value)
    return share if 0.0 < share <= 1.0 else None


# ---- the environment


@dataclass(frozen=True)
class Environment:
    """The environment variables' values. These are all the variables that Onward reads; a value
    that cannot be meant raises OnwardError.

    ONWARD_DUMP: folder for the numbered graph after each stage and pass (`.onnx` and text).
    ONWARD_DISABLE: comma-separated names of rewrite passes to leave out.
    ONWARD_CHECK: 1 checks the graph's invariants after every pass. A batch of which only the rows
        that are read are computed runs once more, changing nothing, with NaN in the others; where
        NaN then arrives in the loss or a gradient, OnwardError names what read them. A model of
        which a part runs in PyTorch is not asked, since the part's code would run twice. 0 does
        nothing of it.
    ONWARD_NATIVE: 0 leaves the native CPU kernels out; plain, avx2 or avx512 takes that build.
    ONWARD_NATIVE_FOLDER: folder of other builds of the native kernels, such as one with sanitizers;
        default: those that the installation compiled.
    ONWARD_BLAS: torch, openblas or mkl takes that engine for every matrix product.
    ONWARD_CACHE: folder for what is measured once per machine, for captures and graphs; default:
        onward in the user's cache.
    ONWARD_GRAPH_CACHE: 0 keeps no captures and graphs of steps on disk, and reads none.
    """

    dump: Path | None = None
    disable: tuple[str, ...] = field(default=())
    check: bool = False
    native: str = ""
    native_folder: Path | None = None
    blas: str = ""
    cache: Path = Path(".cache")
    graph_cache: bool = True


# The values of variables that have but few; an empty one is as good as none.
VALUES = {
    "ONWARD_CHECK": ("0", "1"),
    "ONWARD_GRAPH_CACHE": ("0", "1"),
    "ONWARD_NATIVE": ("0", "plain", "avx2", "avx512"),
    "ONWARD_BLAS": ("torch", "openblas", "mkl"),
}
FOLDERS = ("ONWARD_DUMP", "ONWARD_CACHE", "ONWARD_NATIVE_FOLDER")
VARIABLES = (*FOLDERS, "ONWARD_DISABLE", *VALUES)


def environment() -> Environment:
    """Reads the environment variables afresh, so that a test or a notebook can change them."""
    return _meant(tuple([os.environ.get(name, "") for name in _READ]))


def checking() -> bool:
    """`environment().check`, read alone, since each step asks."""
    return os.environ.get("ONWARD_CHECK") == "1"


def environment_variables() -> dict[str, str]:
    """All of the process's variables as they are now: what code that is not ours may read."""
    return dict(os.environ)


_READ = (*VARIABLES, "XDG_CACHE_HOME", "HOME")


@lru_cache(maxsize=4)  # kernels ask at every product that they bind
def _meant(values: tuple[str, ...]) -> Environment:
    given = dict(zip(_READ, values, strict=True))
    for name, allowed in VALUES.items():
        if given[name] and given[name] not in allowed:
            raise OnwardError(
                f"{name}={given[name]} is invalid; fix: one of {', '.join(allowed)}, or unset it"
            )
    for name in FOLDERS:
        if given[name] and Path(given[name]).exists() and not Path(given[name]).is_dir():
            raise OnwardError(f"{name}={given[name]} is a file; fix: set it to a folder")
    builds = given["ONWARD_NATIVE_FOLDER"]
    if builds and not Path(builds).exists():
        raise OnwardError(
            f"ONWARD_NATIVE_FOLDER={builds} does not exist; fix: set it to a "
            "folder with built native kernels, or unset it"
        )
    return Environment(
        dump=Path(given["ONWARD_DUMP"]) if given["ONWARD_DUMP"] else None,
        disable=read_names("ONWARD_DISABLE", given["ONWARD_DISABLE"], commas=True),
        check=given["ONWARD_CHECK"] == "1",
        native=given["ONWARD_NATIVE"],
        native_folder=Path(builds) if builds else None,
        blas=given["ONWARD_BLAS"],
        cache=_cache(given["ONWARD_CACHE"], given["XDG_CACHE_HOME"]),
        graph_cache=given["ONWARD_GRAPH_CACHE"] != "0",
    )


def _cache(own: str, users: str) -> Path:
    if own or users:
        return Path(own) if own else Path(users) / "onward"
    try:
        return Path.home() / ".cache" / "onward"
    except RuntimeError as error:  # a user id that the system has no name for, and no HOME
        raise OnwardError(
            "the cache has no place, since this user has no home folder; fix: set "
            "ONWARD_CACHE to a folder"
        ) from error


def check_variables() -> None:
    """Raises OnwardError for a variable that nothing reads but one of ours resembles."""
    for name in os.environ:
        if name.startswith("ONWARD_") and name not in VARIABLES:
            close = get_close_matches(name, VARIABLES, n=1, cutoff=0.9)
            if close:
                raise OnwardError(
                    f"unknown environment variable {name}; fix: did you mean {close[0]}?"
                )


def variables() -> dict[str, str]:
    """The variables that are set and change what Onward does: its own, and OpenMP's."""
    names = (*VARIABLES, "OMP_NUM_THREADS")
    return {name: os.environ[name] for name in names if os.environ.get(name)}
