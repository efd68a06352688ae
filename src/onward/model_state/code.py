"""Tells the user's own code from installed packages', and lists the names that code reads."""

from __future__ import annotations

import contextlib
import dis
import functools
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

# Both the configured paths and those that modules report, which differ behind symbolic links.
_STANDARD = {
    path
    for found in (Path(sysconfig.get_paths()["stdlib"]), Path(os.__file__).parent)
    for path in (str(found), str(found.resolve()))
}
ASIDE = {  # packages for logging, metrics and data, whose objects are no part of a model
    "accelerate", "comet_ml", "datasets", "lightning", "mlflow", "pandas", "pytorch_lightning",
    "rich", "tensorboard", "tensorboardX", "tokenizers", "torchmetrics", "tqdm", "wandb",
}  # fmt: skip
_ASIDE_WITHIN = (("sentence_transformers.", ".model_card"),)  # such parts of other packages
_BY_NAME = {"getattr", "attrgetter", "methodcaller", "hasattr"}
HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made at run time, not in C
_OPAQUE = {"torch", "onward"}
# libraries wherever they lie (site-packages, a checkout, a vendored copy), each with a module in it
# by which a copy is recognized
_LIBRARIES = {
    "diffusers": "modeling_utils", "huggingface_hub": "hf_api", "peft": "peft_model",
    "safetensors": "torch", "timm": "models", "transformers": "modeling_utils", "trl": "trainer",
}  # fmt: skip


def module_of(cls: type) -> str:
    """Returns the name of the module that defines a class; "<exec>" for a class that `exec` makes
    without a `__name__`, which itself says "builtins"."""
    module = getattr(cls, "__module__", "builtins")
    made = getattr(cls, "__flags__", 0) & HEAP_TYPE
    return "<exec>" if module == "builtins" and made else module


@functools.lru_cache(maxsize=4096)
def origin(module: str | None) -> str:
    """Returns whose code a module is: the user's "own", an installed "package"'s, or "opaque",
    which no walk looks into (torch, the standard library, logging packages)."""
    if module is None or module.partition(".")[0] in _OPAQUE or is_aside(module):
        return "opaque"
    if any(module.startswith(a) and module.endswith(b) for a, b in _ASIDE_WITHIN):
        return "opaque"
    if library(module):
        return "package"
    file = _file_of(module)
    if file is not None:
        return _place(file)
    frozen = module in sys.builtin_module_names or module.startswith("_frozen")
    return "opaque" if frozen else "own"  # a notebook, `exec`, or a module loaded by its path


def is_aside(module: str) -> bool:
    """Returns whether a module is of an installed package in `ASIDE`. A user's own folder may have
    such a name."""
    parts = module.split(".")
    if parts[0] not in ASIDE:
        return False
    within = (".".join(parts[:i]) for i in range(len(parts), 0, -1))  # modules in C have no file
    file = next(filter(None, map(_file_of, within)), None)
    return file is not None and _place(file) != "own"


def _file_of(module: str) -> str | None:
    return getattr(sys.modules.get(module), "__file__", None)


@functools.lru_cache(maxsize=4096)
def library(module: str) -> str:
    """Returns the known library that a module belongs to, also for a copy vendored in another
    package; "" for none."""
    parts = module.split(".")
    for i, part in enumerate(parts):
        if part not in _LIBRARIES:
            continue
        package = ".".join(parts[: i + 1])
        spec = getattr(sys.modules.get(package), "__spec__", None)
        places = getattr(spec, "submodule_search_locations", None) or ()
        marks = (Path(place, _LIBRARIES[part]) for place in places)
        if any(mark.is_dir() or mark.with_suffix(".py").is_file() for mark in marks):
            return part
    return ""


def _place(file: str) -> str:
    if "site-packages" in file or "dist-packages" in file:
        return "package"
    return "opaque" if file.startswith((*_STANDARD, "<frozen")) else "own"


def is_own(x: types.FunctionType) -> bool:
    """Returns whether the user wrote a function."""
    name = x.__module__ or ""
    if name.partition(".")[0] in _OPAQUE or is_aside(name) or library(name):
        return False
    return _place(x.__code__.co_filename) == "own"


def own_parts(x: types.FunctionType) -> dict[str, Any]:
    """Returns what a library's function holds of the user's, such as the function that a decorator
    has wrapped, by place: functions, and containers with functions (`functools.singledispatch`)."""
    found: dict[str, Any] = {}
    if x.__closure__ or x.__dict__:
        _add_own_parts(x, "", found, {id(x)})
    return found


def _add_own_parts(
    x: types.FunctionType, place: str, found: dict[str, Any], seen: set[int]
) -> None:
    held = {"__wrapped__": x.__dict__.get("__wrapped__")}
    for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # not assigned yet
            held[name] = cell.cell_contents
    for name, value in held.items():
        if isinstance(value, (dict, list, tuple)):
            values = value.values() if isinstance(value, dict) else value
            if any(isinstance(f, types.FunctionType) and is_own(f) for f in list(values)):
                found[f"{place}.{name}"] = value
            continue
        function = _bare(value)
        if function is None or id(function) in seen:
            continue
        seen.add(id(function))
        if is_own(function):
            found[f"{place}.{name}"] = value
        else:
            _add_own_parts(function, f"{place}.{name}", found, seen)


def _bare(x: Any) -> types.FunctionType | None:
    """Returns the function within a method, a partial and a cache; None for other values."""
    while not isinstance(x, types.FunctionType):
        if isinstance(x, types.MethodType):
            x = x.__func__
        elif isinstance(x, functools.partial):
            x = x.func
        elif isinstance(x, functools._lru_cache_wrapper):
            x = x.__wrapped__
        else:
            return None
    return x


def underlying(x: Any) -> types.FunctionType | None:
    """Returns the function within a static or class method or a property; None for other values."""
    if isinstance(x, (staticmethod, classmethod)):
        x = x.__func__
    elif isinstance(x, property):
        x = x.fget
    elif isinstance(x, functools.cached_property):
        x = x.func
    elif isinstance(x, functools.singledispatchmethod):
        x = x.dispatcher
    return x if isinstance(x, types.FunctionType) else None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code object, and those of the functions nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the global and builtin names that code reads, each once."""
    return tuple(
        {
            i.argval: None
            for part in _codes(code)
            for i in dis.get_instructions(part)
            if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        }
    )


@functools.lru_cache(maxsize=4096)
def attribute_names(code: types.CodeType) -> tuple[str, ...]:
    """Returns all names of globals and attributes in code, each once."""
    return tuple({name: None for part in _codes(code) for name in part.co_names})


@functools.lru_cache(maxsize=4096)
def names_by_string(code: types.CodeType) -> bool:
    """Returns whether code may read an attribute by a name that it computes."""
    return any(_BY_NAME & set(part.co_names) for part in _codes(code))


@functools.lru_cache(maxsize=4096)
def strings_for_names(code: types.CodeType) -> tuple[str, ...]:
    """Returns the strings in code of which it may make names of attributes; none where it reads no
    attribute by a computed name."""
    if not names_by_string(code):
        return ()
    strings = (c for part in _codes(code) for c in part.co_consts if isinstance(c, str))
    return tuple(s for s in strings if len(s) > 1 and f"a{s}".isidentifier())


@functools.lru_cache(maxsize=4096)
def imported_names(code: types.CodeType, package: str) -> tuple[str, ...]:
    """Returns the full names of the modules that code itself imports, each once. package: the name
    of the package that the code lies in, to which relative imports refer."""
    found: dict[str, None] = {}
    for part in _codes(code):
        before: list[Any] = [None, None]  # the arguments of the last two instructions
        for i in dis.get_instructions(part):
            if i.opname == "IMPORT_NAME":
                level = before[0] if isinstance(before[0], int) else 0
                parts = package.split(".")
                base = parts[: len(parts) + 1 - level] if level else []
                found[".".join(filter(None, [*base, i.argval]))] = None
            before = [before[1], i.argval]
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def slot_names(cls: type) -> tuple[str, ...]:
    """Returns the `__slots__` of a class and its bases, without those of opaque modules."""
    held = [vars(c).get("__slots__", ()) for c in cls.__mro__ if origin(module_of(c)) != "opaque"]
    names = chain.from_iterable((h,) if isinstance(h, str) else h for h in held)
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))
