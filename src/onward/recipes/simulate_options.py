"""The options of `onward simulate`: typed, and checked before anything is estimated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from onward.recipes.options import InputError, option


@dataclass(frozen=True)
class SimulateConfig:
    """One model, its batch and its ranks; every field is an option of `onward simulate`."""

    model: str | None = option(
        None,
        "bert-large, gpt2, gpt2-xl, turing-17b, gpt3-175b, llama3-8b, llama3-70b or llama3-405b; "
        "null: a GPT of --hidden, --layers, --heads and --vocab",
    )
    hidden: int | None = option(None, "features of a model of your own")
    layers: int | None = option(None, "layers of a model of your own")
    heads: int | None = option(None, "attention heads of a model of your own")
    vocab: int | None = option(None, "vocabulary of a model of your own; null: 50257")
    ranks: int | None = option(None, "devices that train together; null: one node")
    batch: int | None = option(None, "samples of a step, on all ranks; null: 2 for each rank")
    seq: int | None = option(None, "sequence length, in tokens; null: the model's")
    dp_replicate: int | None = option(None, "ranks that replicate the model; null: searched")
    dp_shard: int | None = option(None, "ranks that ZeRO shards over; null: searched")
    tp: int | None = option(None, "ranks of tensor parallelism; null: searched")
    cp: int | None = option(None, "ranks of context parallelism; null: 1")
    pp: int | None = option(None, "ranks of a pipeline; null: searched")
    zero: int | None = option(None, "ZeRO stage, 0 to 3; null: 0, 1 and 3 are tried")
    micro_batch: int | None = option(None, "samples of a micro-batch; null: searched")
    chunks: int | None = option(None, "stages of each rank of a pipeline; null: searched")
    recompute: Literal["none", "selective", "full"] | None = option(
        None, "what is recomputed in backward; null: searched"
    )
    dtype: Literal["bf16", "fp32", "fp8"] = option("bf16", "precision of products")
    top: int = option(5, "how many layouts are shown")
    json: bool = option(False, "print JSON in place of text")

    @property
    def fixed(self) -> dict[str, Any]:
        """The fields of a MeshLayout that are given."""
        names = (
            "dp_replicate", "dp_shard", "tp", "cp", "pp", "zero", "micro_batch", "chunks",
            "recompute",
        )  # fmt: skip
        return {n: getattr(self, n) for n in names if getattr(self, n) is not None}


_SIZES = (
    "hidden", "layers", "heads", "vocab", "ranks", "batch", "seq", "dp_replicate", "dp_shard",
    "tp", "cp", "pp", "micro_batch", "chunks", "top",
)  # fmt: skip
_LARGEST = 10**7

# (option, condition on its value, the condition in words)
CONDITIONS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    *((name, lambda v: 0 < v <= _LARGEST, f"from 1 to {_LARGEST}") for name in _SIZES),
    ("zero", lambda v: 0 <= v <= 3, "from 0 to 3"),
    ("ranks", lambda v: v <= 10**5, "at most 100000"),
    ("pp", lambda v: v <= 1024, "at most 1024"),
)


def check_simulate(config: SimulateConfig) -> None:
    """Raises InputError for the first invalid value."""
    for name, holds, words in CONDITIONS:
        value = getattr(config, name)
        if value is not None and not holds(value):
            raise InputError(f"{name} is {value!r}", f"in --{name}", f"give a value {words}")
    own = [n for n in ("hidden", "layers", "heads", "vocab") if getattr(config, n) is not None]
    if config.model is not None and own:
        raise InputError(
            f"both --model and --{own[0]} are given", "on the command line", "leave one of them out"
        )
    if config.model is None:
        lacking = [n for n in ("hidden", "layers", "heads") if getattr(config, n) is None]
        if lacking:
            what = "no model is given" if len(lacking) == 3 else f"no --{lacking[0]} is given"
            raise InputError(
                what, "on the command line", "add --model, or --hidden, --layers and --heads"
            )


__all__ = ["CONDITIONS", "SimulateConfig", "check_simulate"]
