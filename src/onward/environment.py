"""The environment variables that Onward reads. No other module reads the environment."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

from onward.errors import OnwardError
from onward.option_fields import documented
from onward.option_readers import read_names


def variable(
    name: str, default: Any, doc: str, values: Sequence[str] = (), folder: bool = False
) -> Any:
    """A dataclass field that an environment variable sets.

    values: allowed values; () allows any text. An empty value counts as unset. folder: whether it
    names a folder.
    """
    metadata = {"name": name, "doc": f"{name}: {doc}", "values": tuple(values), "folder": folder}
    return dataclasses.field(default=default, metadata=metadata)


@documented
@dataclass(frozen=True)
class Environment:
    """The values of all environment variables that Onward reads. An invalid value raises
    OnwardError."""

    dump: Path | None = variable(
        "ONWARD_DUMP",
        None,
        "folder for the numbered graph after each stage and pass (`.onnx` and text)",
        folder=True,
    )
    disable: tuple[str, ...] = variable(
        "ONWARD_DISABLE", (), "comma-separated names of rewrite passes to leave out"
    )
    check: bool = variable(
        "ONWARD_CHECK",
        False,
        "1 checks the graph's invariants after every pass, and what it may hold after every stage",
        ("0", "1"),
    )
    """1 also repeats each run of a batch on only the rows that are read, with NaN in the other
    rows. If NaN arrives in the loss or a gradient, OnwardError names what read them. Models with a
    part that runs in PyTorch are exempt, since the part's code would run twice. 0 checks
    nothing."""

    native: str = variable(
        "ONWARD_NATIVE",
        "",
        "0 leaves the native CPU kernels out; plain, avx2 or avx512 takes that build",
        ("0", "plain", "avx2", "avx512"),
    )
    native_folder: Path | None = variable(
        "ONWARD_NATIVE_FOLDER",
        None,
        "folder of other builds of the native kernels, such as one with sanitizers; default: those "
        "that the installation compiled",
        folder=True,
    )
    blas: str = variable(
        "ONWARD_BLAS",
        "",
        "torch, openblas or mkl takes that engine for every matrix product",
        ("torch", "openblas", "mkl"),
    )
    cache: Path = variable(
        "ONWARD_CACHE",
        Path(".cache"),
        "folder for what is measured once per machine, for captures and graphs; default: onward in "
        "the user's cache",
        folder=True,
    )
    graph_cache: bool = variable(
        "ONWARD_GRAPH_CACHE",
        True,
        "0 keeps no captures and graphs of steps on disk, and reads none",
        ("0", "1"),
    )


_FIELDS = [field.metadata for field in dataclasses.fields(Environment)]
_VALUES = {field["name"]: field["values"] for field in _FIELDS if field["values"]}
_FOLDERS = tuple(field["name"] for field in _FIELDS if field["folder"])
VARIABLES: tuple[str, ...] = tuple(field["name"] for field in _FIELDS)


def environment() -> Environment:
    """Reads the environment variables again, so that tests and notebooks can change them."""
    return _meant(tuple([os.environ.get(name, "") for name in _READ]))


def checking() -> bool:
    """`environment().check`, read alone and quickly, since each step needs it."""
    return os.environ.get("ONWARD_CHECK") == "1"


def environment_variables() -> dict[str, str]:
    """All of the process's variables as they are now, which other code may read."""
    return dict(os.environ)


_READ = (*VARIABLES, "XDG_CACHE_HOME", "HOME")


@lru_cache(maxsize=4)  # kernels call this for every product that they bind
def _meant(values: tuple[str, ...]) -> Environment:
    given = dict(zip(_READ, values, strict=True))
    for name, allowed in _VALUES.items():
        if given[name] and given[name] not in allowed:
            raise OnwardError(
                f"{name}={given[name]} is invalid; fix: one of {', '.join(allowed)}, or unset it"
            )
    for name in _FOLDERS:
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
    except RuntimeError as error:  # no HOME, and a user id without a name
        raise OnwardError(
            "the cache has no place, since this user has no home folder; fix: set "
            "ONWARD_CACHE to a folder"
        ) from error


def tell_own_command() -> None:
    """Says that this process runs `onward` by its command line. Its arguments then decide a capture
    through the model and its configuration alone, as a script's own need not."""
    _own.append(sys.modules["__main__"])


def is_own_command() -> bool:
    """Returns whether this process runs `onward` by its command line, and no script within it, as
    `onward explain train.py` does."""
    return sys.modules["__main__"] in _own


_own: list[ModuleType] = []  # the main module of the command


def switch_off_telemetry() -> None:
    """Keeps onnxruntime, which is to be imported next, from collecting and sending telemetry; a
    value that the user has given ORT_DISABLE_TELEMETRY stays."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")


def check_variables() -> None:
    """Raises OnwardError for an unknown variable whose name resembles one of Onward's."""
    for name in os.environ:
        if name.startswith("ONWARD_") and name not in VARIABLES:
            close = get_close_matches(name, VARIABLES, n=1, cutoff=0.9)
            if close:
                raise OnwardError(
                    f"unknown environment variable {name}; fix: did you mean {close[0]}?"
                )


def variables() -> dict[str, str]:
    """The set variables that affect Onward: its own, and OpenMP's."""
    names = (*VARIABLES, "OMP_NUM_THREADS")
    return {name: os.environ[name] for name in names if os.environ.get(name)}
