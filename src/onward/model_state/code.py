"""Whose code a class or a function is, and the names that it reads."""

from __future__ import annotations

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

# Both the configured paths and those that modules report: links may lie between.
_STANDARD = {
    path
    for found in (Path(sysconfig.get_paths()["stdlib"]), Path(os.__file__).parent)
    for path in (str(found), str(found.resolve()))
}
ASIDE = {  # packages whose objects are no part of a model: they count, log or hold data
    "accelerate", "comet_ml", "datasets", "lightning", "mlflow", "pandas", "pytorch_lightning",
    "rich", "tensorboard", "tensorboardX", "tokenizers", "torchmetrics", "tqdm", "wandb",
}  # fmt: skip
_ASIDE_WITHIN = (("sentence_transformers.", ".model_card"),)  # the same, of parts of a package
HEAP_TYPE = 1 << 9  # of a class made by running code: Py_TPFLAGS_HEAPTYPE
_OPAQUE = {"torch", "onward", *ASIDE}
# libraries by name, wherever they lie: in site-packages, in a checkout, in a vendored copy, which
# holds this module
_LIBRARIES = {
    "diffusers": "modeling_utils", "huggingface_hub": "hf_api", "peft": "peft_model",
    "safetensors": "torch", "timm": "models", "transformers": "modeling_utils", "trl": "trainer",
}  # fmt: skip


def module_of(cls: type) -> str:
    """Returns the name of the module that a class is of. A class that `exec` makes where no
    `__name__` is set has none: "<exec>", though it says "builtins"."""
    module = getattr(cls, "__module__", "builtins")
    made = getattr(cls, "__flags__", 0) & HEAP_TYPE
    return "<exec>" if module == "builtins" and made else module


@functools.lru_cache(maxsize=4096)
def origin(module: str | None) -> str:
    """Whose code a module is: the user's "own", a "package"'s, or "opaque": not looked into."""
    if module is None or module.partition(".")[0] in _OPAQUE:
        return "opaque"
    if any(module.startswith(a) and module.endswith(b) for a, b in _ASIDE_WITHIN):
        return "opaque"
    if library(module):
        return "package"
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is not None:
        return _place(file)
    frozen = module in sys.builtin_module_names or module.startswith("_frozen")
    return "opaque" if frozen else "own"  # typed in, executed, or loaded by its path


@functools.lru_cache(maxsize=4096)
def library(module: str) -> str:
    """The library that a module is of, also where a package of the user's has a copy of it within;
    "" for none that is known."""
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
    name = x.__module__ or ""
    if name.partition(".")[0] in _OPAQUE or library(name):
        return False
    return _place(x.__code__.co_filename) == "own"


def underlying(x: Any) -> types.FunctionType | None:
    """The function of a method, class method, property and the like."""
    if isinstance(x, (staticmethod, classmethod)):
        x = x.__func__
    elif isinstance(x, property):
        x = x.fget
    elif isinstance(x, functools.cached_property):
        x = x.func
    return x if isinstance(x, types.FunctionType) else None


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code and those of the functions written in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
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
    return tuple({name: None for part in _codes(code) for name in part.co_names})


@functools.lru_cache(maxsize=4096)
def slot_names(cls: type) -> tuple[str, ...]:
    held = [vars(c).get("__slots__", ()) for c in cls.__mro__ if origin(module_of(c)) != "opaque"]
    names = chain.from_iterable((h,) if isinstance(h, str) else h for h in held)
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))
