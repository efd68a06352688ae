"""Describes a model and its loss function by facts that are the same in another process.

A walk's facts hold objects by identity (`Same`), which means nothing in another process. Here a
class is described by its name, a function by its name and code, a tensor by dtype, shape, strides.
An object that has an identity alone is a doubt, and so is code of the user's that may read anything
else (a file, the clock, the order of a set): a capture with doubts is not stored.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import json
import logging
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from onward.environment import environment_variables
from onward.model_state.code import is_own, module_of, names_by_string, origin
from onward.model_state.facts import ATOMS, Same, atom
from onward.model_state.own_code import (
    PURE,
    asks,
    builtins_read,
    code_digest,
    doubts_of_code,
    is_pure,
    of_library_file,
)
from onward.model_state.patches import ABSENT
from onward.model_state.walk import CONSTRUCTS, Read, Walk, _attributes_of

_UNCALLED = {"__init__", "__post_init__", "__new__", "__del__", "__reduce__"}
_CALLED = {  # methods that torch or Python calls, without their names in the user's code
    "forward", "backward", "setup_context", "jvp", "vmap", "__repr__", "__str__",
}  # fmt: skip
_WRITTEN_BY_PYTHON = {  # attributes of a class that no forward depends on
    "__module__", "__doc__", "__qualname__", "__dict__", "__weakref__", "__annotations__",
    "__parameters__", "__orig_bases__", "__abstractmethods__", "__slots__", "__match_args__",
    "__dataclass_fields__", "__dataclass_params__", "__hash__", "__static_attributes__",
    "__firstlineno__", "__annotate__", "__annotate_func__", "__classcell__",
    "__jit_unused_properties__",
}  # fmt: skip
_METACLASSES = ("builtins", "abc", "enum", "torch", "typing")
_LIBRARIES = ("transformers.", "torch.")
_SETS = {  # attributes of transformers' models that no forward reads
    "_no_split_modules", "_keep_in_fp32_modules", "_keep_in_fp32_modules_strict",
    "_skip_keys_device_placement", "_tied_weights_keys", "_non_persistent_buffers_set",
}  # fmt: skip
_NAMED = (types.FunctionType, types.BuiltinFunctionType, type)
_CLOSURE = 6  # levels of functions within closures of functions


class _Called(set[str]):
    """Names of methods that may be called. everything: whether it contains every name but those of
    `_UNCALLED`, since code that is not looked into, or a computed name, may call any method."""

    everything = False

    def __contains__(self, name: object) -> bool:
        return name not in _UNCALLED and (self.everything or super().__contains__(name))


class Lasting(Walk):
    """A walk whose facts can be compared across processes.

    read: which attributes of plain objects matter. told: path -> fact in JSON's terms, once `tell`
    is called. doubts: why equal facts may not mean an equal model; empty where they do.
    """

    def __init__(self, model: torch.nn.Module, loss_fn: Any, read: Read) -> None:
        self.doubts: list[str] = []
        self._by_others = False
        self._within: set[int] = set()
        roots = [r for r in (model, loss_fn) if isinstance(r, torch.nn.Module)]
        self._owned = {id(t) for r in roots for t in (*r.parameters(), *r.buffers())}
        super().__init__(model, loss_fn, read)
        if self.long:
            self.doubts.append("a container of which only the length is recorded")
        self.told: dict[str, Any] = {}

    def tell(self) -> None:
        """Fills `told`, and adds to `doubts`."""
        self.told = {path: self._plainly(fact, path) for path, fact in sorted(self.facts.items())}

    def modules(self) -> set[str]:
        """Returns the names of the modules that define the classes and functions of the walk."""
        found = {module_of(cls) for cls in self.classes}
        for fact in self.facts.values():
            for x in fact if isinstance(fact, tuple) else (fact,):
                held = x.held if isinstance(x, Same) else None
                if isinstance(held, (type, types.FunctionType)):
                    found.add(held.__module__ or "")
        found.update(module_of(type(x)) for x, _ in self.plain.values())
        return found

    def attributes(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yields the plain objects that have a `__dict__`, each with it."""
        for x, _ in self.plain.values():
            held = _attributes_of(x)
            if held is not None:
                yield x, held

    def stood(self, path: str, value: Any, absent: bool) -> None:
        """Records that before the forward this value stood at a path, or none (`absent`)."""
        if path in self.facts:
            self.facts[path] = ABSENT if absent else atom(value)

    # ---- what is looked at beyond an ordinary walk

    def _finish(self) -> None:
        self._called = _Called([*_CALLED, *self._called])
        self._called.everything = self._by_others
        super()._finish()

    def _leave_out(self, x: Any, path: str) -> None:
        self.facts[path] = Same(x)
        self.doubts.append(f"{path}: too many values")

    def visit(self, x: Any, path: str, depth: int = -1) -> None:
        super().visit(x, path, depth)
        if isinstance(x, type) and origin(module_of(x)) == "own":
            for cls in x.__mro__:
                if origin(module_of(cls)) == "own":
                    self._class(cls)
            # a class that code names may be called; `__class__` is the cell that `super()` needs
            if not path.endswith(".__class__"):
                for name in CONSTRUCTS:
                    made = getattr(getattr(x, name, None), "__func__", getattr(x, name, None))
                    if isinstance(made, types.FunctionType):
                        self.visit(made, f"{path}.{name}")

    def _module(self, m: torch.nn.Module, path: str) -> None:
        super()._module(m, path)
        self.facts[f"{path}.training"] = bool(m.training)
        if not _is_known(type(m)):
            self.doubts.append(f"{path}: {type(m).__qualname__} is another package's")
        for name, held in vars(m).items():
            if name.endswith("_hooks") and held:
                self.doubts.append(f"{path} has {name}")

    def _tensor(self, x: torch.Tensor, path: str) -> None:
        super()._tensor(x, path)
        if id(x) not in self._owned or type(x) not in (torch.Tensor, torch.nn.Parameter):
            self.doubts.append(f"{path}: a tensor that no module registers")
        elif f"{path}.shape" not in self.facts:
            self.doubts.append(f"{path}: a tensor without memory")
        elif getattr(x, "_backward_hooks", None) or getattr(x, "_post_accumulate_grad_hooks", None):
            self.doubts.append(f"{path} has hooks")
        else:
            self.facts[f"{path}.shape"] = (*self.facts[f"{path}.shape"], x.storage_offset())

    def _function(self, x: Any, path: str, depth: int) -> None:
        super()._function(x, path, depth)
        if isinstance(x, functools._lru_cache_wrapper):
            self.facts[path] = type(x)  # the number of its entries differs between processes

    def _container(self, x: Any, path: str, depth: int) -> None:
        super()._container(x, path, depth)
        several = isinstance(x, (set, frozenset)) and len(x) > 1
        if several and not all(type(v) in (int, bool) for v in x):
            # the order of iteration differs between processes, as string hashes do
            self.facts[f"{path} (order)"] = "" if self._is_librarys(path) else Same(x)

    def _is_librarys(self, path: str) -> bool:
        """Returns whether the path is an attribute of a class of transformers or torch, which do
        not iterate over their own sets."""
        name = path.rpartition(".")[2]
        return path.startswith(_LIBRARIES) or name in _SETS or name.startswith("_keys_to_ignore")

    def _object(self, x: Any, path: str, depth: int) -> None:
        super()._object(x, path, depth)
        if origin(module_of(type(x))) == "package":
            self._call_all()
        if path in self.plain and not _is_known(type(x)):
            whose = module_of(type(x)).partition(".")[0]
            if whose not in PURE:
                self.doubts.append(f"{path}: {type(x).__qualname__} is another package's")

    def _class(self, cls: type) -> None:
        if cls in self.classes:
            return
        super()._class(cls)
        if origin(module_of(cls)) == "package":
            self._call_all()  # a package's code, which is not looked into, may call any method
        path = self.classes.get(cls)
        if path is None or origin(module_of(cls)) != "own":
            return
        if module_of(type(cls)).partition(".")[0] not in _METACLASSES:
            self.doubts.append(f"{path}: a metaclass of its own")
        for key, x in list(vars(cls).items()):
            if isinstance(x, property):
                for f in (x.fset, x.fdel):
                    if isinstance(f, types.FunctionType):
                        self.visit(f, f"{path}.{key}.set")
            written = key in _WRITTEN_BY_PYTHON or not key.startswith("__")
            if not written and not isinstance(x, (types.FunctionType, staticmethod, classmethod)):
                self.visit(x, f"{path}.{key}", 1)

    def _call_all(self) -> None:
        self._by_others = True
        if isinstance(self._called, _Called):
            self._called.everything = True

    def _reads(self, x: types.FunctionType, path: str) -> None:
        super()._reads(x, path)
        if names_by_string(x.__code__):
            self._call_all()
        self.doubts += [f"{path}: {doubt}" for doubt in doubts_of_code(x)]
        for name in builtins_read(x):  # another process may define a name that is missing here
            self.facts[f"{x.__module__}.{name} (set)"] = False
        if "environ" in x.__code__.co_names or "getenv" in x.__code__.co_names:
            self.facts["os.environ"] = tuple(sorted(environment_variables().items()))

    def _global(
        self, scope: Mapping[str, Any], name: str, place: str | None, names: tuple[str, ...]
    ) -> None:
        super()._global(scope, name, place, names)
        value = scope.get(name)
        if isinstance(value, types.ModuleType) and origin(value.__name__) != "own":
            if not is_pure(value.__name__):
                self.doubts.append(f"{place}.{name}: the module {value.__name__}")
            for attribute in names:  # a function that the user has put into a library
                x = vars(value).get(attribute)
                if isinstance(x, types.FunctionType) and is_own(x):
                    self.doubts.append(f"{value.__name__}.{attribute}: {x.__qualname__}")

    def _space(self, module: types.ModuleType, names: tuple[str, ...]) -> None:
        if (id(module), names) not in self._spaces:
            if "getattr" in names or "vars" in names:
                self.doubts.append(f"{module.__name__}: a module whose attributes are computed")
            if "__getattr__" in vars(module):
                self.doubts.append(f"{module.__name__}: a module with a __getattr__")
        super()._space(module, names)

    # ---- facts in JSON's terms

    def _plainly(self, fact: Any, path: str) -> Any:
        """Returns a fact in JSON's terms; adds a doubt where it has no such form."""
        if isinstance(fact, Same):
            if isinstance(fact.held, (torch.nn.Module, torch.Tensor)):
                self.doubts.append(f"{path}: {type(fact.held).__qualname__}")
            if isinstance(fact.held, _NAMED) and not path.startswith(_LIBRARIES):
                function: Any = fact.held
                if asks(function.__name__):  # under any name
                    self.doubts.append(f"{path}: {function.__qualname__}")
            return self._meaning(fact.held, path)
        if isinstance(fact, tuple):
            return [
                "it"
                if isinstance(x, Same) and isinstance(x.held, (torch.nn.Module, torch.Tensor))
                else self._plainly(x, path)
                for x in fact
            ]
        if isinstance(fact, list):
            return [self._plainly(x, path) for x in fact]
        if isinstance(fact, (set, frozenset)):
            return ["set", sorted(json.dumps(self._plainly(x, path)) for x in fact)]
        if fact is ABSENT:
            return ["absent"]
        if isinstance(fact, bytes):
            return ["bytes", hashlib.sha256(fact).hexdigest()]
        if fact is None or isinstance(fact, (bool, int, str)):
            return fact
        if type(fact) in ATOMS or isinstance(fact, np.dtype):
            return [type(fact).__name__, repr(fact)]
        if isinstance(fact, type):
            return self._meaning(fact, path)
        return self._doubt(fact, path)

    def _meaning(self, x: Any, path: str) -> Any:
        """Returns a description of an object that is the same in any process, in JSON's terms; adds
        a doubt, and returns "?", where it has none."""
        if type(x) in ATOMS:
            return [type(x).__name__, repr(x)]
        if isinstance(x, type):
            if not _is_known(x) and module_of(x).partition(".")[0] not in PURE:
                return self._doubt(x, path)
            return ["class", module_of(x), x.__qualname__]
        if isinstance(x, enum.Enum):
            return ["enum", self._meaning(type(x), path), x.name]
        if isinstance(x, types.ModuleType):
            known = is_pure(x.__name__) or origin(x.__name__) == "own"
            return ["module", x.__name__] if known else self._doubt(x, path)
        if isinstance(x, (staticmethod, classmethod)):
            return [type(x).__name__, self._meaning(x.__func__, path)]
        if isinstance(x, property):
            parts = (x.fget, x.fset, x.fdel)
            return ["property", *(f and self._meaning(f, path) for f in parts)]
        if isinstance(x, functools.cached_property):
            return ["cached", self._meaning(x.func, path)]
        if isinstance(x, types.CodeType):
            return ["code", code_digest(x)]
        if isinstance(x, types.BuiltinFunctionType):
            holder = getattr(x.__self__, "__name__", None) if x.__self__ is not None else None
            place = holder or x.__module__
            if place is None or place.partition(".")[0] not in PURE or asks(x.__name__):
                return self._doubt(x, path)
            return ["builtin", place, x.__qualname__]
        if isinstance(x, logging.Logger):
            return ["logger", x.name, x.getEffectiveLevel()]
        if isinstance(x, types.FunctionType):
            if is_own(x):  # where it may be called, the walk also looks at what it reads
                return ["function", x.__module__, x.__qualname__, code_digest(x.__code__)]
            return self._of_library(x, path)
        if isinstance(x, (types.GenericAlias, types.UnionType)):
            return ["alias", repr(x)]
        return self._doubt(x, path)

    def _of_library(self, x: types.FunctionType, path: str) -> Any:
        """Describes a library's function by its code and its closure (what decorators hold)."""
        held = _FUNCTIONS.get(id(x))
        if held is not None and held[0] is x and held[1] is x.__code__:
            return held[2]
        before = len(self.doubts)
        told = self._function_told(x, path, _CLOSURE)
        if len(self.doubts) == before:
            _FUNCTIONS[id(x)] = x, x.__code__, told
        return told

    def _function_told(self, x: types.FunctionType, path: str, depth: int) -> Any:
        if id(x) in self._within:  # a function in its own closure
            return "again"
        module = x.__module__ or ""
        known = module.partition(".")[0] in (*PURE, "onward")
        if not depth or not known or not of_library_file(x.__code__.co_filename):
            return self._doubt(x, f"{path} ({x.__qualname__} of {module})")
        told = ["function", module, x.__qualname__, code_digest(x.__code__)]
        self._within.add(id(x))
        for cell in x.__closure__ or ():
            with contextlib.suppress(ValueError):  # not assigned yet
                told.append(self._enclosed(cell.cell_contents, path, depth - 1))
        self._within.discard(id(x))
        return told

    def _enclosed(self, x: Any, path: str, depth: int) -> Any:
        """Describes a value in the closure of a library's function; an object by its class alone,
        since the library's code makes it the same way in each process."""
        if type(x) in ATOMS:
            return [type(x).__name__, repr(x)]
        if isinstance(x, functools._lru_cache_wrapper):
            x = x.__wrapped__
        if isinstance(x, types.MethodType):
            held = [self._enclosed(x.__func__, path, depth), type(x.__self__)]
            return ["method", held[0], self._meaning(held[1], path)]
        if isinstance(x, types.FunctionType):
            return self._function_told(x, path, depth)
        if isinstance(x, (type, types.BuiltinFunctionType, staticmethod, classmethod)):
            return self._meaning(x, path)
        if isinstance(x, (tuple, list)) and depth and len(x) < 100:
            return [type(x).__name__, *(self._enclosed(y, path, depth - 1) for y in x)]
        if isinstance(x, dict) and depth and len(x) < 100:
            return ["dict", *(self._enclosed(pair, path, depth - 1) for pair in x.items())]
        if callable(x) and not is_pure(module_of(type(x))):
            return self._doubt(x, path)
        return self._meaning(type(x), path)

    def _doubt(self, x: Any, path: str) -> str:
        self.doubts.append(f"{path}: {type(x).__module__}.{type(x).__qualname__}")
        return "?"


_FUNCTIONS: dict[int, tuple[types.FunctionType, types.CodeType, Any]] = {}


def _of_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("torch", "transformers")


def _is_known(cls: type) -> bool:
    """Returns whether a class and all its bases are torch's, transformers', the user's, or of
    another module in `PURE`."""
    for c in cls.__mro__[:-1]:
        module = module_of(c)
        known = _of_library(module) or module.partition(".")[0] in PURE
        if origin(module) != "own" and not known:
            return False
    return True


__all__ = ["Lasting"]
