"""The options of `onward bench`, and the engines as data; checked before a process starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path

from onward.recipes.options import InputError, option

PRECISIONS = ("fp32", "bf16")
# fewer page faults: torch then asks for large allocations in huge pages
_LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}


@dataclass(frozen=True)
class BenchEngine:
    """One way to run a training step. compiled: under torch.compile; fused: one kernel for all of
    AdamW. env: variables of its process."""

    name: str
    about: str
    compiled: bool = False
    fused: bool = False
    env: Mapping[str, str] = field(default_factory=dict)


BENCH_ENGINES = {
    engine.name: engine
    for engine in (
        BenchEngine("eager", "PyTorch as it comes"),
        BenchEngine(
            "eager-tuned", "eager, fused AdamW, THP_MEM_ALLOC_ENABLE=1", False, True, _LARGE_PAGES
        ),
        BenchEngine("compile", "torch.compile(model)", True),
        BenchEngine(
            "compile-tuned",
            "torch.compile(model), fused AdamW, THP_MEM_ALLOC_ENABLE=1",
            True,
            True,
            _LARGE_PAGES,
        ),
        BenchEngine("onward", "onward.Trainer"),
    )
}


@dataclass(frozen=True)
class BenchConfig:
    """What to measure; every field is an option of `onward bench`."""

    engines: str = option(
        "eager,eager-tuned,compile,onward",
        f"engines that take turns: some of {', '.join(BENCH_ENGINES)}",
        several=True,
    )
    precision: str = option("fp32", "fp32, bf16 (autocast), or both of them", several=True)
    steps: int = option(5, "timed steps of each engine in each round")
    rounds: int = option(3, "turns of every engine; each other round runs backwards")
    warmup: int = option(2, "steps before the first round that are not timed, after the first one")
    batch_size: int | None = option(None, "batch size of a model by name; null: 4")
    sequence_length: int | None = option(None, "tokens of a sequence of a model by name; null: 128")
    output_dir: str | None = option(
        None, "new folder for bench.json and, with matplotlib, bench.svg; null: nothing is written"
    )
    json: bool = option(False, "print JSON in place of a table")

    @property
    def engine_names(self) -> list[str]:
        """The engines in the order of their table, each once."""
        asked = _words(self.engines)
        return [name for name in BENCH_ENGINES if name in asked]

    @property
    def precisions(self) -> list[str]:
        """The precisions, each once."""
        return list(dict.fromkeys(_words(self.precision)))

    @property
    def batches(self) -> int:
        """Batches that each engine sees: of the first step, the warm-up and the rounds."""
        return 1 + self.warmup + self.rounds * self.steps


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def check_bench(target: str, config: BenchConfig) -> None:
    """Raises InputError for the first invalid value."""
    for name, known in (("engines", [*BENCH_ENGINES]), ("precision", [*PRECISIONS])):
        words = _words(getattr(config, name))
        for word in words or [""]:
            if word not in known:
                close = get_close_matches(word, known, n=1)
                fix = f"did you mean {close[0]}?" if close else f"some of {', '.join(known)}"
                raise InputError(f"{name} has {word!r}", f"in --{name}", fix)
    for name, least in (("steps", 1), ("rounds", 1), ("warmup", 0), ("batch_size", 1)):
        value = getattr(config, name)
        if value is not None and value < least:
            raise InputError(f"{name} is {value}", f"in --{name}", f"give {least} or more")
    if config.sequence_length is not None and config.sequence_length < 2:
        raise InputError("too short a sequence", "in --sequence_length", "give at least 2 tokens")
    for name in ("batch_size", "sequence_length"):
        if ":" in target and getattr(config, name) is not None:
            raise InputError(
                f"{name} has no effect: the function returns the batch",
                f"in --{name}",
                "leave it out",
            )
    if target.endswith(".py"):
        raise InputError(
            "bench does not run scripts", "as MODEL_OR_SCRIPT",
            "name a function that returns a model and a batch: module.py:function",
        )  # fmt: skip
    if config.output_dir is not None:
        path = Path(config.output_dir)
        if path.exists() and not (path.is_dir() and not any(path.iterdir())):
            raise InputError(
                f"{config.output_dir!r} is no empty folder", "in --output_dir", "name a new one"
            )


__all__ = ["BENCH_ENGINES", "PRECISIONS", "BenchConfig", "BenchEngine", "check_bench"]
