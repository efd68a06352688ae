"""The file of a sweep: `base` options, and a `grid` of lists or a list of `runs`, as the runs
that it asks for. Each is checked like a command line before the first one starts."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from onward.errors import OnwardError
from onward.recipes.option_places import placed
from onward.recipes.option_sources import (
    Given,
    given_in,
    mapping_of,
    place_of,
    text_of,
)
from onward.recipes.options import FinetuneConfig, InputError, option

if TYPE_CHECKING:
    import yaml

_PARTS = ("base", "grid", "runs")
# the sweep itself decides these
_DECIDED = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "dry_run")
MOST = 1000  # runs of a sweep
_LONGEST = 80  # characters of a folder's name
_FORM = "write base: options, and grid: lists of values, or runs: a list of options"
Check = Callable[[list[str]], FinetuneConfig]


@dataclass(frozen=True)
class SweepConfig:
    """How a sweep is run; every field is an option of `onward sweep`."""

    output_dir: str | None = option(
        None, "folder for the runs, each in one of its own; null: runs/ and the file's name"
    )
    json: bool = option(False, "print the results as JSON in place of a table")
    dry_run: bool = option(False, "check every run's options, print its command line, start none")


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep. name: of its folder. options: all of them. varied: those in which the
    runs differ, as the file spells them."""

    name: str
    options: tuple[Given, ...]
    varied: dict[str, str]

    @property
    def words(self) -> list[str]:
        """The options as words of a command line."""
        return [f"--{each.spelled}={each.value}" for each in self.options]


def runs_of(path: str) -> list[SweepRun]:
    """Reads the runs of a sweep. Raises InputError, with the line, for anything else."""
    found = mapping_of(path)
    if found is None:
        raise InputError(f"{path!r} is empty", "as SWEEP", _FORM)
    parts: dict[str, Any] = {}
    for key, value in found.value:
        name, place = text_of(key, "", place_of(key, path)), place_of(key, path)
        if name not in _PARTS or name in parts:
            what = f"{name} twice" if name in parts else f"unknown part {name!r} of a sweep"
            raise InputError(what, place, _FORM)
        parts[name] = value
    if ("grid" in parts) == ("runs" in parts):
        what = "both grid and runs" if "grid" in parts else "neither grid nor runs"
        raise InputError(f"{path!r} has {what}", "as SWEEP", _FORM)
    base = tuple(_options(parts["base"], path)) if "base" in parts else ()
    chosen = _grid(parts["grid"], path) if "grid" in parts else _listed(parts["runs"], path)
    runs = [_run(base, each) for each in chosen]
    for number, run in enumerate(runs):
        if any(run.name == other.name for other in runs[:number]):
            where = run.options[-1].where if run.options else "as SWEEP"
            raise InputError("two runs have the same options", where, "leave one out")
    return runs


def check_runs(runs: Sequence[SweepRun], check: Check) -> None:
    """Raises InputError, with the line of the file, for the first run with invalid options."""
    for run in runs:
        try:
            check(run.words)
        except InputError as error:
            raise placed(error, {_own(each.spelled): each for each in run.options}) from error
        except OnwardError as error:
            raise OnwardError(f"run {run.name}: {error}") from error


def _own(spelled: str) -> str:
    return spelled.replace("-", "_")


def _options(node: yaml.Node, path: str) -> list[Given]:
    """Options in a mapping. Raises InputError for those that the sweep decides."""
    import yaml

    if not isinstance(node, yaml.MappingNode):
        raise InputError("no mapping of options to values", place_of(node, path), _FORM)
    found = list(given_in(node, path))
    _refuse_decided(found)
    return found


def _refuse_decided(given: Sequence[Given]) -> None:
    for number, each in enumerate(given):
        if _own(each.spelled) in _DECIDED:
            what = f"the sweep sets {each.spelled} itself"
            raise InputError(what, each.where, "leave it out")
        if any(_own(each.spelled) == _own(other.spelled) for other in given[:number]):
            raise InputError(f"option {each.spelled} twice", each.where, "give it once")


def _grid(node: yaml.Node, path: str) -> list[tuple[Given, ...]]:
    """Every choice of one value from each list, the last list's values in turn first."""
    import yaml

    if not isinstance(node, yaml.MappingNode) or not node.value:
        raise InputError("the grid has no lists", place_of(node, path), _FORM)
    lists: list[list[Given]] = []
    for key, value in node.value:
        place = place_of(key, path)
        name = text_of(key, "", place)
        if not isinstance(value, yaml.SequenceNode) or not value.value:
            raise InputError(f"{name} of the grid is no list of values", place, f"{name}: [1, 2]")
        places = [place_of(item, path) for item in value.value]
        lists.append(
            [
                Given(name, text_of(item, name, where), where, "file")
                for item, where in zip(value.value, places, strict=True)
            ]
        )
    _refuse_decided([each[0] for each in lists])
    count = 1
    for each in lists:
        count *= len(each)
    if count > MOST:
        raise InputError(f"the grid has {count} runs", place_of(node, path), f"at most {MOST}")
    return list(itertools.product(*lists))


def _listed(node: yaml.Node, path: str) -> list[tuple[Given, ...]]:
    import yaml

    if not isinstance(node, yaml.SequenceNode) or not 0 < len(node.value) <= MOST:
        raise InputError(f"runs is no list of 1 to {MOST} runs", place_of(node, path), _FORM)
    return [tuple(_options(each, path)) for each in node.value]


def _run(base: tuple[Given, ...], own: tuple[Given, ...]) -> SweepRun:
    names = {_own(each.spelled) for each in own}
    kept = tuple(each for each in base if _own(each.spelled) not in names)
    return SweepRun(_folder(own), (*kept, *own), {_own(each.spelled): each.value for each in own})


def _folder(own: Sequence[Given]) -> str:
    """A folder's name by the options that are the run's own, so that a run keeps its folder where
    others are added to the file: `learning_rate=0.001,seed=1`."""
    text = ",".join(f"{_own(each.spelled)}={each.value}" for each in own) or "base"
    safe = re.sub(r"[^\w=,.+-]", "_", text, flags=re.ASCII)
    if safe == text and len(text) <= _LONGEST:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:8]
    return f"{safe[:_LONGEST]}-{digest}"


__all__ = ["SweepConfig", "SweepRun", "check_runs", "runs_of"]
