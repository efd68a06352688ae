"""Finds in a user function's code what it may read that no walk records: files, clocks, ...

Builtins and modules are allowed by name (`_BUILTINS`, `PURE`), attributes are refused by name
(`_ASKS`).
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import importlib.util
import os
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from onward.model_state.code import _BY_NAME, _STANDARD, _codes, global_names

# modules whose functions depend on their arguments alone, but for the attributes in `_ASKS`
PURE = {
    "abc", "builtins", "cmath", "collections", "contextlib", "copy", "dataclasses", "enum",
    "functools", "itertools", "logging", "math", "numbers", "numpy", "operator", "torch",
    "transformers", "types", "typing", "typing_extensions", "warnings", "_operator", "_functools",
    "_collections_abc", "_collections", "_abc", "argparse",
}  # fmt: skip
_SYSTEM = "os"  # code may read its environment variables alone
_OF_SYSTEM = {"environ", "getenv", "get"}
_BUILTINS = {
    "ArithmeticError", "AssertionError", "AttributeError", "BaseException", "DeprecationWarning",
    "Ellipsis", "Exception", "False", "FutureWarning", "ImportError", "IndexError", "KeyError",
    "LookupError", "ModuleNotFoundError", "NameError", "None", "NotImplemented",
    "NotImplementedError", "OverflowError", "RuntimeError", "RuntimeWarning", "StopIteration",
    "True", "TypeError", "UserWarning", "ValueError", "Warning", "ZeroDivisionError", "__debug__",
    "__name__", "abs", "all", "any", "bool", "bytes", "callable", "classmethod", "complex",
    "delattr", "dict", "divmod", "enumerate", "filter", "float", "getattr", "hasattr", "int",
    "isinstance", "issubclass", "iter", "len", "list", "map", "max", "min", "next", "object",
    "pow", "print", "property", "range", "repr", "reversed", "round", "setattr", "slice", "sorted",
    "staticmethod", "str", "sum", "super", "tuple", "type", "zip",
}  # fmt: skip
# attributes that read a file, another process, the clock, a generator or the interpreter
_ASKS = {
    "DataLoader", "Generator", "_C", "backends", "cache_dir", "cached_file", "classes", "cpp",
    "compile", "cpp_extension", "ctypeslib", "cuda", "currentframe", "default_generator",
    "device_count", "distributed", "fromfile", "from_file", "from_json_file", "from_pretrained",
    "genfromtxt", "get_config_dict", "get_num_threads", "get_rng_state", "getlogger", "hub",
    "initial_seed", "jit", "lib", "library", "loadtxt", "memmap", "mps", "multiprocessing", "npyio",
    "open", "ops", "pipeline", "random", "read_bytes", "read_text", "rng", "seed", "serialization",
    "set_default_device", "set_default_dtype", "set_rng_state", "shared_memory", "utils_cpp",
    "version", "worker_info", "xpu",
}  # fmt: skip
_STARTS = ("cached_", "download", "load", "is_available", "memory_")
_DUNDERS = {  # dunder names that code may use without reading the interpreter's state
    "__add__", "__all__", "__bases__", "__call__", "__class__", "__contains__", "__delitem__",
    "__dict__", "__doc__", "__enter__", "__eq__", "__exit__", "__getattr__", "__getattribute__",
    "__getitem__", "__hash__", "__init__", "__init_subclass__", "__iter__", "__len__", "__module__",
    "__mul__", "__name__", "__new__", "__post_init__", "__qualname__", "__radd__", "__repr__",
    "__rmul__", "__setattr__", "__setitem__", "__str__", "__sub__", "__torch_function__",
    "__truediv__",
}  # fmt: skip
_ARITHMETIC_OF_SETS = {"&", "|", "^", "-", "&=", "|=", "^=", "-="}


def asks(name: str) -> bool:
    """Returns whether an attribute of this name may read what no walk records."""
    return name in _ASKS or name.startswith(_STARTS)


def is_pure(module: str) -> bool:
    """Returns whether a module is one of PURE or `os`, or lies within one."""
    first, _, rest = module.partition(".")
    return (first in PURE or module == _SYSTEM) and not _ASKS & set(rest.split("."))


def of_library_file(file: str) -> bool:
    """Returns whether a file belongs to Python, torch, transformers or Onward."""
    return file.startswith(_library_folders())


@functools.cache
def _library_folders() -> tuple[str, ...]:
    found = [*_STANDARD, "<frozen "]
    for name in ("torch", "transformers", "onward"):
        spec = importlib.util.find_spec(name)
        found += [
            str(Path(place)) + os.sep for place in (spec and spec.submodule_search_locations) or ()
        ]
    return tuple(found)


def builtins_read(x: types.FunctionType) -> list[str]:
    """Returns the names that a function reads that are neither globals nor builtins."""
    names = global_names(x.__code__)
    return [n for n in names if n not in x.__globals__ and not hasattr(builtins, n)]


def doubts_of_code(x: types.FunctionType) -> list[str]:
    """Returns, in words, what a function may read that no walk records; empty where nothing."""
    scope = x.__globals__
    free = set(global_names(x.__code__)) - scope.keys()
    found = [f"calls {n}" for n in free if hasattr(builtins, n) and n not in _BUILTINS]
    system = any(getattr(scope.get(n), "__name__", "") == _SYSTEM for n in global_names(x.__code__))
    put = [n for n in free if isinstance(getattr(builtins, n, None), types.FunctionType)]
    found += [f"calls the builtin {n}, which has been replaced" for n in put]
    return [*found, *_doubts(x.__code__, system)]


@functools.lru_cache(maxsize=4096)
def _doubts(code: types.CodeType, system: bool) -> tuple[str, ...]:
    found: list[str] = []
    for part in _codes(code):
        names = set(part.co_names)
        for name in names:
            if asks(name):
                found.append(f"names {name}")
            if name.startswith("__") and name.endswith("__") and name not in _DUNDERS:
                found.append(f"names {name}")
        if names & _BY_NAME:  # then a string may be the name of an attribute
            said = {c for c in part.co_consts if isinstance(c, str)}
            found += [f"has {n!r}" for n in said if asks(n)]
        mapping = names & {"keys", "items"}
        before: Any = None
        for i in dis.get_instructions(part):
            if i.opname == "IMPORT_NAME" and not is_pure(str(i.argval)):
                found.append(f"imports {i.argval}")
            if i.opname in ("BUILD_SET", "SET_ADD", "SET_UPDATE"):
                found.append("makes a set, whose order differs between processes")
            if mapping and i.opname == "BINARY_OP" and i.argrepr in _ARITHMETIC_OF_SETS:
                found.append("may make a set, whose order differs between processes")
            if isinstance(before, frozenset) and i.opname != "CONTAINS_OP":
                found.append("has a set, whose order differs between processes")
            before = i.argval if i.opname == "LOAD_CONST" else None
        if system:
            asked = [n for n in names if hasattr(os, n) and n not in _OF_SYSTEM]
            found += [f"names os.{n}" for n in asked]
    return tuple(found)


_digests: dict[int, tuple[types.CodeType, str]] = {}


def code_digest(code: types.CodeType) -> str:
    """Returns a SHA-256 of what a code object does, without its file and line numbers."""
    held = _digests.get(id(code))
    if held is None:
        made = hashlib.sha256()
        for part in _parts(code):
            made.update(part)
            made.update(b"\0")
        held = _digests[id(code)] = code, made.hexdigest()  # keeps it alive: no id is reused
    return held[1]


def _parts(code: types.CodeType) -> Iterator[bytes]:
    yield code.co_code
    yield getattr(code, "co_exceptiontable", b"")
    numbers = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    names = (code.co_name, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)
    yield repr((numbers, names)).encode()
    for constant in code.co_consts:
        yield _constant(constant)


def _constant(x: Any) -> bytes:
    if isinstance(x, types.CodeType):
        return b"code " + code_digest(x).encode()
    if isinstance(x, frozenset):
        return b"set " + b",".join(sorted(map(_constant, x)))
    if isinstance(x, tuple):
        return b"tuple " + b",".join(map(_constant, x))
    return f"{type(x).__name__} {x.hex() if isinstance(x, float) else x!r}".encode()


__all__ = [
    "PURE",
    "asks",
    "builtins_read",
    "code_digest",
    "doubts_of_code",
    "is_pure",
    "of_library_file",
]
