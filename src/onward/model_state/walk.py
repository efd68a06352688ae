"""Walk: visits all objects reachable from a model and its loss function, and records facts.

`prepare/guards.py` lists what a walk sees and what it does not.
"""

from __future__ import annotations

import enum
import functools
import logging
import sys
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeGuard

import numpy as np
import torch

from onward.model_state.code import (
    attribute_names,
    global_names,
    imported_names,
    is_aside,
    is_own,
    module_of,
    names_by_string,
    origin,
    own_parts,
    slot_names,
    strings_for_names,
    underlying,
)
from onward.model_state.facts import (
    ATOMS,
    BYTES,
    DEPTH,
    ELEMENTS,
    Same,
    atom,
    key_fact,
    state,
)
from onward.model_state.patches import ABSENT
from onward.model_state.wrappers import unwrapped

_FUNCTIONS = (
    types.FunctionType, types.MethodType, functools.partial, functools.partialmethod,
    functools._lru_cache_wrapper,
)  # fmt: skip
_PARTIAL = ("func", "args", "keywords")
_PLAIN = {  # classes of the standard library that are looked into all the same
    "types.SimpleNamespace", "argparse.Namespace", "collections.UserDict", "collections.UserList",
    "collections.ChainMap", "weakref.WeakKeyDictionary", "weakref.WeakValueDictionary",
    "_thread._local", "threading.local", "queue.Queue", "queue.LifoQueue", "queue.PriorityQueue",
}  # fmt: skip
VALUES = 500_000  # values that a walk looks into; of any others it records the identity alone
SECONDS = 20.0  # a walk's time limit, after which it does the same; not before `AT_LEAST` values
AT_LEAST = 50_000
NESTING = 120  # levels of values within values; each takes a few Python stack frames
_BASES = (object, torch.nn.Module)
log = logging.getLogger("onward")
_told: list[str] = []
CONSTRUCTS = ("__init__", "__post_init__", "__new__")
_NOT_CALLED = {"__init__", "__post_init__", "__del__", "__reduce__"}
# attributes of nn.Module that a walk treats separately, or not at all
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MODULE = frozenset(torch.nn.Module().__dict__)
_SLOT = "_compiled_call_impl"  # called instead of a module's forward and hooks if set


# (plain object, path) -> the attributes of it that matter; None for all
Read = Callable[[Any, str], frozenset[str] | None]


class Walk:
    """A walk from a model and its loss function. `facts`: path -> fact, compared by value; the
    other fields are the objects for a `Sweep` to watch.

    read: which attributes of plain objects matter; all of them by default.
    """

    elements, bytes, depth = ELEMENTS, BYTES, DEPTH

    def __init__(
        self, model: torch.nn.Module, loss_fn: Any, read: Read = lambda x, path: None
    ) -> None:
        self.facts: dict[str, Any] = {}
        self.mappings: list[Mapping[Any, Any]] = []
        self.sequences: list[Any] = []
        self.empty: list[Any] = []  # empty containers, which have to stay empty
        self.long: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.functions: list[types.FunctionType] = []
        self.cells: list[types.CellType] = []
        self.names: dict[tuple[int, str], Any] = {}  # (id of a scope, global name read) -> scope
        self.slots: list[tuple[Any, str]] = []
        self.objects: list[Any] = []  # objects whose `__class__` may be assigned
        # path -> plain object, and which of its attributes matter (None: all)
        self.plain: dict[str, tuple[Any, frozenset[str] | None]] = {}
        self.fields: list[tuple[dict[str, Any], str]] = []  # (`__dict__`, attribute) of those
        self._read = read
        self._visits = self._nesting = 0
        self._until = time.monotonic() + SECONDS
        self.caches: list[Any] = []  # functions under functools.lru_cache
        self.classes: dict[type, str] = {}
        self._own = {id(m) for m in model.modules()}
        self._seen: dict[int, tuple[str, Any]] = {}  # id -> path, and the object, kept alive
        self._called: set[str] = {"forward"}
        self._methods: list[tuple[str, types.FunctionType, str]] = []
        self._unread: list[tuple[types.FunctionType, str]] = []
        self._computes = False  # whether code reads attributes by names that it computes
        self._parts: set[str] = set()  # strings in such code
        self._said: set[str] = set()  # strings that attributes and elements hold
        self._made: set[type] = set()
        self._spaces: set[tuple[int, tuple[str, ...]]] = set()  # own modules and names looked up
        self._modules: dict[int, types.ModuleType] = {}  # own modules held by anything but code
        self.visit(model, "model")
        self.visit(loss_fn, "loss_fn")
        self._finish()

    def _finish(self) -> None:
        """Looks into functions and methods that may be called, and records which tensors share
        memory and torch's defaults."""
        while ready := self._ready():
            self._methods = [m for m in self._methods if not self._may_call(m[0])]
            self._unread = []
            for function, path in ready:
                if self._is_enough():
                    self._leave_out(function, path)
                else:
                    self._reads(function, path)
        groups: dict[int, list[int]] = {}
        for i, tensor in enumerate(self.tensors):
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(i)
        shared = sorted(group for pointer, group in groups.items() if pointer and len(group) > 1)
        self.facts["tensors that share memory"] = shared
        self.facts["torch.get_default_dtype()"] = torch.get_default_dtype()
        self.facts["torch.get_default_device()"] = torch.get_default_device()

    def _ready(self) -> list[tuple[types.FunctionType, str]]:
        """Returns the functions and methods to look into next; where there are none, those that
        code may call of the user's modules that are attributes or elements."""
        found = self._unread + [m[1:] for m in self._methods if self._may_call(m[0])]
        if found or not self._modules:
            return found
        names = tuple(sorted(self._called))
        for module in self._modules.values():
            self._space(module, names)
        return self._unread + [m[1:] for m in self._methods if self._may_call(m[0])]

    def _may_call(self, name: str) -> bool:
        """Returns whether code names a method, or may put the name together."""
        if name in self._called or not self._computes:
            return name in self._called
        parts = tuple(self._parts)
        return name in self._said or name.startswith(parts) or name.endswith(parts)

    def visit(self, x: Any, path: str, depth: int = -1) -> None:
        """Records `x`, found at `path`, and what it holds. depth: how many levels of plain objects
        to look into; -1 means `self.depth`."""
        depth = self.depth if depth < 0 else depth
        if type(x) in ATOMS:
            self.facts[path] = atom(x)
            if type(x) is str:
                self._said.add(x)
            return
        if isinstance(x, np.generic):
            self.facts[path] = (type(x), x.tobytes())
            return
        if isinstance(x, (enum.Enum, type, types.ModuleType)):
            self.facts[path] = Same(x)
            if isinstance(x, type) and origin(module_of(x)) == "own":
                self._class(x)
                # `__class__` is the cell that `super()` needs
                if not issubclass(x, torch.nn.Module) and not path.endswith(".__class__"):
                    self._constructed(x)
            elif _is_own_module(x):
                self._modules[id(x)] = x
            return
        met = self._seen.get(id(x))
        if met is not None:
            if met[0] != path:  # the same path is a cycle, as with a function that calls itself
                self.facts[path] = ("as", met[0])
            return
        self._seen[id(x)] = (path, x)
        self._visits += 1
        known = isinstance(x, (torch.Tensor, torch.nn.Module))
        if not known and (self._is_enough() or self._nesting > NESTING):
            self._leave_out(x, path)
            return
        self._nesting += 1
        self._look_into(x, path, depth)
        self._nesting -= 1

    def _is_enough(self) -> bool:
        asked = self._visits > AT_LEAST and self._visits % 1000 == 0
        if asked and time.monotonic() > self._until:
            self._until = -1.0
        return self._until < 0 or self._visits > VALUES

    def _leave_out(self, x: Any, path: str) -> None:
        """Records an object's identity and nothing that it holds; logs a warning the first time."""
        self.facts[path] = Same(x)
        if not _told:  # once, as there may be as many places as values
            _told.append(path)
            log.warning(
                "%s holds too many or too deeply nested values to watch, so that later "
                "changes there are not noticed; fix: do not store data sets or long lists on "
                "the model or its loss",
                path.partition("[")[0][:80],
            )

    def _look_into(self, x: Any, path: str, depth: int) -> None:
        if isinstance(x, torch.Tensor):
            self._tensor(x, path)
        elif isinstance(x, torch.nn.Module):
            inner = unwrapped(x)
            self._module(x, path) if inner is x else self.visit(inner, path, depth)
        elif isinstance(x, np.ndarray):
            self._array(x, path)
        elif isinstance(x, (dict, types.MappingProxyType, list, tuple, set, frozenset, deque)):
            self._container(x, path, depth)
        elif isinstance(x, _FUNCTIONS):
            self._function(x, path, depth)
        else:
            self._object(x, path, depth)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the tensors to watch, each with the path at which the walk first met it."""
        return (self._seen[id(t)] for t in self.tensors)

    # ---- tensors and modules

    def _tensor(self, x: torch.Tensor, path: str) -> None:
        self.facts[path] = (Same(x), type(x), x.requires_grad, x.dtype, x.device, x.layout)
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(x, name, None)
            if hooks:
                self.facts[f"{path}.{name}"] = tuple(map(Same, hooks.values()))
                self.mappings.append(hooks)
        self._attributes(x, path, self.depth)
        try:
            x.data_ptr()
            self.facts[f"{path}.shape"] = (tuple(x.shape), x.stride())
        except (RuntimeError, ValueError):
            return  # lazy, sparse or without memory
        self.tensors.append(x)

    def _module(self, m: torch.nn.Module, path: str) -> None:
        held = vars(m)
        aside = is_aside(module_of(type(m)))
        if aside or isinstance(m, torch.jit.ScriptModule):  # whose code is not Python's; refused
            self.facts[path] = Same(m)
            return
        self.facts[path] = (Same(m), Same(type(m)), tuple(held.get("_modules", ())))
        self.objects.append(m)
        self.mappings.append(held)
        for cls in type(m).__mro__:
            self._class(cls)
        for name in ("_parameters", "_buffers"):
            self._watch(held.get(name, {}))
            for key, x in held.get(name, {}).items():
                self.visit(x, f"{path}.{key}")
        for name in _HOOKS:
            hooks = held.get(name, {})
            self._watch(hooks)
            if hooks:
                self.facts[f"{path}.{name}"] = tuple(map(Same, hooks.values()))
        self._watch(held.get("_modules", {}))
        for key, x in held.get("_modules", {}).items():
            self.visit(x, f"{path}.{key}")
        for key, x in held.items():
            # the guards watch the training flags of the model's own modules
            known = key in _MODULE or key == _SLOT
            if not known or (key == "training" and id(m) not in self._own):
                self.visit(x, f"{path}.{key}")

    def _watch(self, own: Mapping[Any, Any]) -> None:
        (self.mappings if own else self.empty).append(own)

    # ---- values

    def _container(self, x: Any, path: str, depth: int) -> None:
        keys: Any = ()
        if len(x) > self.elements:
            keys = Same(x)
            self.long.append(x)
        elif isinstance(x, (dict, types.MappingProxyType)):
            keys = tuple(map(key_fact, x))
            self._watch(x)
            for i, (key, value) in enumerate(list(x.items())):
                name = repr(key) if type(key) in ATOMS else f"#{i}"
                self.visit(value, f"{path}[{name}]", depth)
        elif isinstance(x, (set, frozenset)):
            keys = frozenset(map(key_fact, x))
            (self.sequences if x else self.empty).append(x)
        else:
            (self.sequences if x else self.empty).append(x)
            for i, value in enumerate(x):
                self.visit(value, f"{path}[{i}]", depth)
        self.facts[path] = (type(x), len(x), keys)
        self._attributes(x, path, depth)

    def _array(self, x: np.ndarray[Any, Any], path: str) -> None:
        if x.dtype.hasobject or x.nbytes > self.bytes:
            self.facts[path] = (Same(x), x.dtype, x.shape)
            return
        self.facts[path] = (x.dtype, x.shape, x.tobytes())
        self.arrays.append(x)

    def _object(self, x: Any, path: str, depth: int) -> None:
        """Records an object of any other class: its attributes, or where it is of an opaque class
        or too deep its identity, and the position of a generator or iterator."""
        whose = origin(module_of(type(x)))
        plain = f"{module_of(type(x))}.{type(x).__qualname__}" in _PLAIN
        place = state(x)
        if place is not None:
            self.facts[path] = (Same(x), place)
            return
        if depth <= 0 or not (plain or whose in ("own", "package")):
            self.facts[path] = Same(x)
            return
        if _attributes_of(x) is None and not hasattr(type(x), "__slots__"):
            self.facts[path] = Same(x)
            return
        self.facts[path] = Same(type(x))
        self.objects.append(x)
        for cls in type(x).__mro__ if whose == "own" else ():
            self._class(cls)
        names, held = self._read(x, path), _attributes_of(x)
        self.plain[path] = x, names
        if names is None or held is None:
            self._attributes(x, path, depth - 1)
            return
        for name in sorted(names):
            self.fields.append((held, name))
            if name in held:
                self.visit(held[name], f"{path}.{name}", depth - 1)
            else:
                self.facts[f"{path}.{name}"] = ABSENT

    def _attributes(self, x: Any, path: str, depth: int) -> None:
        held = _attributes_of(x)
        if held is not None:
            self._watch(held)
            for key, value in list(held.items()):
                self.visit(value, f"{path}.{key}", depth)
        for name in slot_names(type(x)):
            self.slots.append((x, name))
            self.visit(getattr(x, name, None), f"{path}.{name}", depth)

    # ---- code

    def _function(self, x: Any, path: str, depth: int) -> None:
        if isinstance(x, types.FunctionType):
            self.facts[path] = Same(x)
            if is_own(x):
                self._unread.append((x, path))  # later, since chains of functions may be long
            else:
                for place, held in own_parts(x).items():
                    self.visit(held, f"{path}{place}", depth)
            return
        self.facts[path] = type(x)
        parts = _PARTIAL
        if isinstance(x, functools._lru_cache_wrapper):
            self.facts[path] = (type(x), x.cache_info().currsize)
            self.caches.append(x)
            parts = ("__wrapped__",)
        elif isinstance(x, types.MethodType):
            parts = ("__self__", "__func__")
        for name in parts:
            self.visit(getattr(x, name), f"{path}.{name}", depth)

    def _reads(self, x: types.FunctionType, path: str) -> None:
        """Records what a user's function reads beside its arguments: defaults, closure, globals."""
        self._coded(x, path)
        names = attribute_names(x.__code__)
        # a constructor's call of the one that it overrides is no call of all constructors
        self._called.update(set(names).difference(CONSTRUCTS if x.__name__ in CONSTRUCTS else ()))
        self._computes = self._computes or names_by_string(x.__code__)
        self._parts.update(strings_for_names(x.__code__))
        self.visit(x.__defaults__, f"{path}.__defaults__")
        self.visit(x.__kwdefaults__, f"{path}.__kwdefaults__")
        self._attributes(x, path, self.depth)
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # not assigned yet
            self.cells.append(cell)
            self._named(content, f"{path}.{name}", names)
        for name in global_names(x.__code__):
            self._global(x.__globals__, name, x.__module__, names)
        for name in imported_names(x.__code__, x.__globals__.get("__package__") or ""):
            while name:  # `import a.b` binds a
                if _is_own_module(module := sys.modules.get(name)):
                    self._space(module, names)
                name = name.rpartition(".")[0]

    def _global(
        self, scope: Mapping[str, Any], name: str, place: str | None, names: tuple[str, ...]
    ) -> None:
        """Records a global that code reads. names: all names in that code; of a user's module they
        may be attributes."""
        if name not in scope:
            return  # a builtin
        self.names[id(scope), name] = scope
        self._named(scope[name], f"{place}.{name}", names)

    def _named(self, value: Any, path: str, names: tuple[str, ...]) -> None:
        """Records what a name in code stands for. names: as for `_global`."""
        if _is_own_module(value):
            self.facts[path] = Same(value)
            self._space(value, names)
        else:
            self.visit(value, path)

    def _space(self, module: types.ModuleType, names: tuple[str, ...]) -> None:
        """Records the attributes of a user's module that have one of these names, also those of
        modules among them."""
        if (id(module), names) in self._spaces:
            return
        self._spaces.add((id(module), names))
        for name in names:
            self._global(vars(module), name, module.__name__, names)

    def _coded(self, x: types.FunctionType, path: str) -> None:
        self.facts[f"{path}.__code__"] = Same(x.__code__)
        self.functions.append(x)

    def _class(self, cls: type) -> None:
        """Records a class's attributes; the user's methods are looked into where they may be
        called."""
        if cls in self.classes or cls in _BASES:
            return
        path = f"{module_of(cls)}.{cls.__qualname__}"
        if path in self.classes.values():
            path += f"#{len(self.classes)}"  # another class of that name, as notebooks make them
        self.classes[cls] = path
        self.mappings.append(vars(cls))
        inherited = _names_in_libraries(cls)
        for key, x in list(vars(cls).items()):
            function = underlying(x)
            if function is not None:
                self.facts[f"{path}.{key}"] = (Same(x), Same(function))
                called = (key.startswith("__") or key in inherited) and key not in _NOT_CALLED
                for place, held in _own_in(function).items():
                    if isinstance(held, types.FunctionType):
                        at = f"{path}.{key}{place}"
                        self._coded(held, at)
                        self._methods.append(("forward" if called else key, held, at))
                    else:
                        self.visit(held, f"{path}.{key}{place}", 1)
            elif not key.startswith("__") and not isinstance(x, types.MemberDescriptorType):
                self.visit(x, f"{path}.{key}", 1)

    def _constructed(self, cls: type) -> None:
        """Looks into what constructs an object of a user's class, which code that names the class
        may call: its constructors and its metaclass."""
        if cls in self._made:
            return
        self._made.add(cls)
        metaclass: type = type(cls)
        for c in (*cls.__mro__, *metaclass.__mro__):
            if origin(module_of(c)) != "own":
                continue
            self._class(c)
            for name in CONSTRUCTS:
                function = underlying(vars(c).get(name))
                parts = {} if function is None else _own_in(function)
                for place, held in parts.items():
                    if isinstance(held, types.FunctionType):
                        self._unread.append((held, f"{self.classes[c]}.{name}{place}"))


def _own_in(x: types.FunctionType) -> dict[str, Any]:
    """Returns a user's function itself, and what a library's function holds of the user's, by its
    place within the function."""
    return {"": x} if is_own(x) else own_parts(x)


def _names_in_libraries(cls: type) -> set[str]:
    """Returns the attributes of the libraries' classes that a user's class extends: their code may
    call a method that overrides one of theirs."""
    if origin(module_of(cls)) != "own":
        return set()
    bases = (c for c in cls.__mro__ if c not in _BASES and not is_aside(module_of(c)))
    return {name for c in bases if origin(module_of(c)) != "own" for name in vars(c)}


def _attributes_of(x: Any) -> dict[str, Any] | None:
    """Returns an object's `__dict__`, bypassing its class, so that reads.py records no read; None
    where it has none."""
    try:
        held = object.__getattribute__(x, "__dict__")
    except AttributeError:
        return None
    return held if isinstance(held, dict) else None


def _is_own_module(x: Any) -> TypeGuard[types.ModuleType]:
    return isinstance(x, types.ModuleType) and origin(x.__name__) == "own"
