"""Options of the command line, parsed by the dataclass that declares them."""

from __future__ import annotations

import dataclasses
import re
import sys
import types
import typing
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

from onward.recipes.option_sources import CONFIG, Given, of_environment, of_file
from onward.recipes.options import REPEATED, InputError
from onward.recipes.switches import Foreign

Config = TypeVar("Config")
_CONFIG_HELP = (
    "YAML file of options, name: value; over it stand variables such as "
    "ONWARD_FINETUNE_MAX_STEPS, and over both the command line"
)
# Every command, in the order in which they are shown.
ABOUT = {
    "finetune": "train a model on text or labelled examples, and save it",
    "pretrain": "pre-train BERT on plain text, in two phases",
    "train": "train an ONNX file on arrays",
    "verify": "compare one training step with eager PyTorch",
    "data": "show the data of a run as the model sees them: counts, and tokens",
    "explain": "show what a training step does, and where its memory is",
    "config": "show the options of finetune and their sources, or check a file",
    "report": "show a run as one page, or compare two",
    "chat": "answer prompts, by the trained model and by what it started from",
    "complete": "continue texts, as chat does without a chat template",
    "search": "find documents for a query by a trained text-retrieval model",
    "export": "write a model, or its training step, as ONNX for any runtime",
    "merge-lora": "add a run's LoRA adapters to the weights that it began with",
    "sweep": "run finetune with each choice of options that a file lists",
    "bench": "time a model's training step by several engines, side by side",
    "simulate": "estimate training steps on a cluster that is described",
    "doctor": "show versions, what is installed, and which kernels are used",
    "cache": "show or delete the compiled graphs and the tokens in the cache on disk",
}


def parse(
    argv: Sequence[str],
    verb: str,
    kind: type[Config],
    foreign: Foreign | None = None,
    before: str = "",
) -> Config | None:
    """Parses the options of `verb` as a `kind`; None after `--help`. What the command line leaves
    open is looked up in the environment, then in the file of `--config`. Raises InputError in one
    line.

    foreign: switches of other programs that are understood; by default those of training. before:
    text before the options in the usage line.
    """
    found = parse_with_places(argv, verb, kind, foreign, before)
    return None if found is None else found[0]


def parse_with_places(
    argv: Sequence[str],
    verb: str,
    kind: type[Config],
    foreign: Foreign | None = None,
    before: str = "",
    others: str | None = None,
    own: frozenset[str] = frozenset(),
) -> tuple[Config, dict[str, Given]] | None:
    """Parses as `parse` does; returns also the values that are given, by option name, with their
    places. others: the command whose variables count; "" for none, None for `verb`. own: options
    that stand on the command line alone."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    hints = typing.get_type_hints(kind)
    foreign = Foreign() if foreign is None else foreign
    told = _given(argv, fields, hints, foreign)
    shared = {name: field for name, field in fields.items() if name not in own}
    others = verb if others is None else others
    given = None if told is None else _with_others(told, others, shared, foreign)
    from jsonargparse import ArgumentError, ArgumentParser

    parser = ArgumentParser(
        prog=f"onward {verb} {before}".strip(),
        description=ABOUT[verb] + ".",
        exit_on_error=False,
    )
    for name, field in fields.items():
        parser.add_argument(
            f"--{name}", type=hints[name], default=field.default, help=field.metadata["help"]
        )
    parser.add_argument(f"--{CONFIG}", type=str | None, default=None, help=_CONFIG_HELP)
    if given is None:
        print(parser.format_help(), end="")  # argparse's own print ignores a closed pipe
        return None
    try:
        parsed = parser.parse_args([f"--{name}={one.value}" for name, one in given.items()])
    except ArgumentError as error:
        match = re.search(r'key "(\w+)"', str(error))
        if match is None or match[1] not in given:
            raise InputError(str(error), "on the command line", "see --help") from error
        one, words = given[match[1]], _words(hints[match[1]])
        raise InputError(f"{match[1]} is {one.value!r}", one.where, f"give {words}") from error
    for note in foreign.notes:
        print(f"onward {verb}: note: {note}", file=sys.stderr)
    values = vars(parsed)
    del values[CONFIG]
    return kind(**values), given


def _with_others(
    told: dict[str, str], verb: str, fields: dict[str, Any], foreign: Foreign
) -> dict[str, Given]:
    """The values of options by name, from the command line, the environment and a file."""
    found: dict[str, Given] = {}
    path, foreign_told = told.pop(CONFIG, None), frozenset(foreign.taken)
    variables = of_environment(verb) if verb else ()
    for others in (() if path is None else of_file(path), variables):
        own: set[str] = set()
        for given in others:
            name = _named(given.spelled, fields, foreign, given.where, "")
            if name in own:
                raise InputError(f"option {given.spelled} twice", given.where, "give it once")
            own.add(name)
            if not foreign.takes(name):
                found[name] = given
            elif name not in foreign_told:
                foreign.take(given.spelled, name, given.value, given.where)
    found |= {name: Given(name, value, f"in --{name}") for name, value in told.items()}
    values = {name: given.value for name, given in found.items()}
    foreign.settle(values)
    return {n: found.get(n) or Given(n, value, f"in --{n}") for n, value in values.items()}


def _named(spelled: str, fields: dict[str, Any], foreign: Foreign, where: str, prefix: str) -> str:
    """The name of an option as it is spelled. Raises InputError for one that there is not."""
    name = spelled.replace("-", "_")
    name = foreign.renamed.get(name, name)
    if name in fields or foreign.takes(name):
        return name
    known = [*fields, *foreign.renamed, *([CONFIG] if prefix else [])]
    raise InputError(f"unknown option {prefix}{spelled}", where, suggestion(name, known, prefix))


def _given(
    argv: Sequence[str], fields: dict[str, Any], hints: dict[str, Any], foreign: Foreign
) -> dict[str, str] | None:
    """The values given as text, by option name in our spelling, that of `--config` too; None where
    help is asked for."""
    given: dict[str, str] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        if word in ("-h", "--help"):
            return None
        if not word.startswith("--"):
            raise InputError(
                f"unexpected argument {word!r}",
                "on the command line",
                f"write --{word}, or remove it",
            )
        spelled, equals, value = word[2:].partition("=")
        is_file = spelled == CONFIG
        place = "on the command line"
        name = CONFIG if is_file else _named(spelled, fields, foreign, place, "--")
        repeated = name in fields and fields[name].metadata.get("repeated")
        if name in given and not repeated:
            raise InputError(f"option --{name} twice", "on the command line", "give it once")
        if not equals:
            follows = words[0] if words else "--"
            if hints.get(name) is bool or foreign.may_stand_alone(name):
                value = words.pop(0) if follows.lower() in ("true", "false") else "true"
            elif follows.startswith("--"):
                raise InputError(
                    f"option --{spelled} has no value", "on the command line", "write one after it"
                )
            else:
                value = words.pop(0)
                several = name in fields and fields[name].metadata.get("several")
                while several and words and not words[0].startswith("-"):
                    value += f",{words.pop(0)}"
        if foreign.takes(name):
            foreign.take(spelled, name, value)
        elif name in given:
            given[name] += f"{REPEATED}{value}"
        else:
            given[name] = value
    return given


def suggestion(name: str, known: list[str], prefix: str) -> str:
    close = get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {prefix}{close[0]}?" if close else "see --help"


def _words(hint: Any) -> str:
    """The values that a type hint allows, in words."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join(_words(part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(str, typing.get_args(hint)))
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(hint, "null")


__all__ = ["ABOUT", "parse", "parse_with_places", "suggestion"]
