"""The options of `onward explain`: typed, and checked before a model is built or a script runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from onward.memory_amounts import MEMORY_BUDGET, memory_amount
from onward.mesh_sizes import AUTO
from onward.recipes.options import InputError, option


@dataclass(frozen=True)
class ExplainConfig:
    """What to explain and how; every field but `target` is an option of `onward explain`."""

    batch_size: int | None = option(None, "batch size of the example batch; null: 4")
    sequence_length: int | None = option(
        None, "sequence length of the example batch, in tokens; null: 128"
    )
    loop: Literal["trainer", "module"] | None = option(
        None, "trainer: onward.Trainer, the whole step; module: your own loop; null: trainer"
    )
    outputs: Literal["auto", "all", "loss"] | None = option(
        None, "with --loop module: outputs= of onward.accelerate; null: auto"
    )
    memory: int | str | None = option(
        None,
        "report the largest batch that fits in this memory (2GB, 512MiB), without running it",
    )
    batch_sizes: str | None = option(
        None, "report the predicted memory of these batch sizes too, separated by commas: 1,2,4"
    )
    memory_budget: int | float | str | None = option(
        None,
        "recompute activations until the step fits (memory_budget= of onward.Trainer); "
        "null: no limit",
    )
    mixed_precision: Literal["no", "bf16", "fp16"] | None = option(
        None, "bf16 or fp16: products in low precision (mixed_precision= of onward.Trainer)"
    )
    loss: str | None = option(
        None, "of an ONNX model: an output that is the loss, or a loss as of onward train"
    )
    data: str | None = option(
        None, "of an ONNX model: a file with arrays, as of onward train; null: an example batch"
    )
    disable: str | None = option(None, "names of passes to leave out, separated by commas")
    profile: bool = option(False, "run the step once and time its launches")
    gpu: str | None = option(
        None,
        "plan the step for a model of GPU, without one: B200, GH200, H200, H100, H100-PCIe, A100, "
        "A10, L40S, L4, RTX-4090, MI300X, V100 or T4",
    )
    mesh: str | None = option(
        None,
        "predict the step on a mesh of ranks in place of the explanation: dp_replicate=2,tp=2; "
        "auto: choose among the meshes of --ranks",
    )
    ranks: int | None = option(None, "with --mesh auto: how many processes there will be")
    zero: int | None = option(None, "with --mesh: the stage of ZeRO, 0 to 3; null: 0, or chosen")
    cluster: str | None = option(
        None,
        "with --mesh: the cluster to predict for, a file or a name as of onward simulate; null: "
        "this machine",
    )
    json: bool = option(False, "print JSON in place of text")
    html: str | None = option(
        None, "write an HTML page to this file too; an existing file is not overwritten"
    )

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(int(n) for n in (self.batch_sizes or "").split(",") if n.strip())


_SIZES = re.compile(r"\s*[1-9]\d*\s*(,\s*[1-9]\d*\s*)*")

# (option, condition on its value, the condition in words)
CONDITIONS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("batch_size", lambda v: v > 0, "above 0"),
    ("sequence_length", lambda v: v > 1, "of at least 2 tokens"),
    ("memory", lambda v: isinstance(memory_amount(v), int), "of bytes, such as 2GB or 512MiB"),
    ("batch_sizes", lambda v: bool(_SIZES.fullmatch(str(v))), "such as 1,2,4"),
    ("memory_budget", lambda v: memory_amount(v) is not None, MEMORY_BUDGET),
    ("ranks", lambda v: 0 < v <= 4096, "from 1 to 4096"),
    ("zero", lambda v: 0 <= v <= 3, "from 0 to 3"),
)
# Options that a script, or a function that returns model and batch, decides itself.
OF_A_BATCH = ("batch_size", "sequence_length")
OF_A_FILE = ("loss", "data")  # options of an ONNX model alone
OF_A_LOOP = ("loop", "outputs", "memory_budget", "disable", "mixed_precision")
# Options that go with --mesh alone, and those that it does not go with.
OF_A_MESH = ("ranks", "zero", "cluster")
NOT_OF_A_MESH = ("outputs", "memory", "batch_sizes", "html", "gpu")


def check_explain(config: ExplainConfig) -> None:
    """Raises InputError for the first invalid value."""
    for name, holds, words in CONDITIONS:
        value = getattr(config, name)
        if value is not None and not holds(value):
            raise InputError(f"{name} is {value!r}", f"in --{name}", f"give a value {words}")
    if config.outputs is not None and config.loop != "module":
        raise InputError(
            "outputs are chosen only in a loop of your own", "in --outputs", "add --loop module"
        )
    if config.mixed_precision is not None and config.loop == "module":
        raise InputError(
            "in a loop of your own torch.autocast decides about precision",
            "in --mixed_precision", "leave it out, or explain a script with the loop",
        )  # fmt: skip
    if config.gpu is not None and config.profile:
        raise InputError("nothing runs on that GPU", "in --profile", "leave it or --gpu out")
    _check_mesh(config)
    if config.html is not None:
        check_new_file(Path(config.html), "html")


def _check_mesh(config: ExplainConfig) -> None:
    """Raises InputError for options that do not go with `--mesh`, or not without it."""
    if config.mesh is None:
        for name in OF_A_MESH:
            if getattr(config, name) is not None:
                raise InputError(f"--{name} needs --mesh", f"in --{name}", "add --mesh")
        return
    for name in NOT_OF_A_MESH:
        if getattr(config, name) is not None:
            raise InputError(
                f"--{name} does not go with --mesh", f"in --{name}", "leave one of them out"
            )
    if config.profile:
        raise InputError("--mesh runs no step", "in --profile", "leave one of them out")
    if config.loop == "module":
        raise InputError(
            "the step of a loop of your own has no mesh", "in --loop", "--loop trainer"
        )
    if config.mesh.strip() == AUTO and config.ranks is None:
        raise InputError("--mesh auto needs a number of processes", "in --mesh", "add --ranks")


def check_new_file(path: Path, name: str) -> None:
    """Raises InputError where a file to be written exists, or its folder does not."""
    if path.exists() or path.is_symlink():
        raise InputError(f"{str(path)!r} exists", f"in --{name}", "name a new file")
    if not path.absolute().parent.is_dir():
        raise InputError(
            f"no folder {str(path.parent)!r} to write into", f"in --{name}", "make the folder first"
        )


def refuse_options(config: ExplainConfig, names: tuple[str, ...], who: str) -> None:
    """Raises InputError for options without effect, since `who` decides them."""
    for name in names:
        if getattr(config, name) is not None:
            raise InputError(f"{who} decides {name}", f"in --{name}", "leave it out")
