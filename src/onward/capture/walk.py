"""A walk over all that a model and its loss function lead to, and a sweep over what it met.

The walk is slow and takes note of values; the sweep is fast and compares object identities. What
they see and what not: `train/guards.py`.
"""

from __future__ import annotations

import array
import contextvars
import dis
import enum
import functools
import io
import itertools
import queue
import random
import sys
import sysconfig
import types
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain, repeat
from operator import attrgetter, is_, length_hint, methodcaller
from typing import Any

import numpy as np
import torch

ELEMENTS = 1000  # a longer container is told by its length
BYTES = 1 << 16  # a larger array is told by its identity
DEPTH = 3  # plain objects within plain objects

_ATOMS = (
    bool, int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype,
    torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip
_FUNCTIONS = (
    types.FunctionType, types.MethodType, functools.partial, functools.partialmethod,
    functools._lru_cache_wrapper,
)  # fmt: skip
_STANDARD = sysconfig.get_paths()["stdlib"]
_ASIDE = {  # packages whose objects are no part of a model: they count, log or hold data
    "accelerate", "comet_ml", "datasets", "lightning", "mlflow", "pandas", "pytorch_lightning",
    "rich", "tensorboard", "tensorboardX", "tokenizers", "torchmetrics", "tqdm", "wandb",
}  # fmt: skip
_OPAQUE = {"torch", "onward", *_ASIDE}
_PLAIN = {  # of the standard library, and yet looked into
    "types.SimpleNamespace", "argparse.Namespace", "collections.UserDict", "collections.UserList",
    "collections.ChainMap", "weakref.WeakKeyDictionary", "weakref.WeakValueDictionary",
    "_thread._local", "threading.local", "queue.Queue", "queue.LifoQueue", "queue.PriorityQueue",
}  # fmt: skip
_BASES = (object, torch.nn.Module)
_NOT_CALLED = {"__init__", "__post_init__", "__repr__", "__str__", "__del__", "__reduce__"}
# of nn.Module's own attributes: looked at in a way of their own, or without meaning for a forward
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MODULE = frozenset(torch.nn.Module().__dict__)
_values = methodcaller("values")
_get = dict.get
_contents = attrgetter("cell_contents")
_parts = attrgetter("__code__", "__defaults__", "__kwdefaults__")
# another device is at another address
_form = attrgetter("__class__", "requires_grad", "dtype", "shape")
_tensor_hooks = attrgetter("_backward_hooks")
_late_hooks = attrgetter("_post_accumulate_grad_hooks")


class Same:
    """Equal to another of the same object, which it keeps alive so that its id stays its own."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)

    def __repr__(self) -> str:
        return f"<{type(self.held).__qualname__} at {id(self.held):x}>"


class Walk:
    """Visits what a model holds: `facts` by path, compared by value, and what to watch."""

    elements, bytes, depth = ELEMENTS, BYTES, DEPTH

    def __init__(self, model: torch.nn.Module, loss_fn: Any) -> None:
        self.facts: dict[str, Any] = {}
        self.mappings: list[Mapping[Any, Any]] = []
        self.sequences: list[Any] = []
        self.empty: list[Any] = []  # what holds nothing, and is to stay so
        self.long: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.functions: list[types.FunctionType] = []
        self.cells: list[types.CellType] = []
        self.names: dict[tuple[int, str], Any] = {}  # the scopes of globals that are read
        self.slots: list[tuple[Any, str]] = []
        self.objects: list[Any] = []  # whose class may be set
        self.caches: list[Any] = []  # of functools
        self.classes: dict[type, str] = {}
        self._own = {id(m) for m in model.modules()}
        self._seen: dict[int, tuple[str, Any]] = {}  # id -> path, and the object to keep its id
        self._called: set[str] = {"forward"}
        self._methods: list[tuple[str, types.FunctionType, str]] = []
        self.visit(model, "model")
        self.visit(loss_fn, "loss_fn")
        self._finish()

    def _finish(self) -> None:
        """Looks into the methods that are called, and at which tensors share memory."""
        while ready := [m for m in self._methods if m[0] in self._called]:
            self._methods = [m for m in self._methods if m[0] not in self._called]
            for _, function, path in ready:
                self._reads(function, path)
        groups: dict[int, list[int]] = {}
        for i, tensor in enumerate(self.tensors):
            groups.setdefault(tensor.untyped_storage().data_ptr(), []).append(i)
        shared = sorted(group for pointer, group in groups.items() if pointer and len(group) > 1)
        self.facts["tensors that share memory"] = shared
        self.facts["torch.get_default_dtype()"] = torch.get_default_dtype()
        self.facts["torch.get_default_device()"] = torch.get_default_device()

    def visit(self, x: Any, path: str, depth: int = -1) -> None:
        """Takes note of `x`, which stands at `path`, and of what it holds, down to so many levels
        of objects (-1: `self.depth`)."""
        depth = self.depth if depth < 0 else depth
        if type(x) in _ATOMS:
            self.facts[path] = _atom(x)
            return
        if isinstance(x, np.generic):
            self.facts[path] = (type(x), x.tobytes())
            return
        if isinstance(x, (enum.Enum, type, types.ModuleType)):
            self.facts[path] = Same(x)
            if isinstance(x, type) and _origin(x.__module__) == "own":
                self._class(x)
            return
        seen = self._seen.setdefault(id(x), (path, x))[0]
        if seen != path:
            self.facts[path] = ("as", seen)
        elif isinstance(x, torch.Tensor):
            self._tensor(x, path)
        elif isinstance(x, torch.nn.Module):
            self._module(x, path)
        elif isinstance(x, np.ndarray):
            self._array(x, path)
        elif isinstance(x, (dict, types.MappingProxyType, list, tuple, set, frozenset, deque)):
            self._container(x, path, depth)
        elif isinstance(x, _FUNCTIONS):
            self._function(x, path, depth)
        else:
            self._object(x, path, depth)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors to watch, and where the walk met them first."""
        return (self._seen[id(t)] for t in self.tensors)

    # ---- tensors and modules

    def _tensor(self, x: torch.Tensor, path: str) -> None:
        self.facts[path] = (Same(x), type(x), x.requires_grad, x.dtype, x.device, x.layout)
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(x, name, None)
            if hooks:
                self.facts[f"{path}.{name}"] = tuple(map(Same, hooks.values()))
        self._attributes(x, path, self.depth)
        try:
            x.data_ptr()
            self.facts[f"{path}.shape"] = (tuple(x.shape), x.stride())
        except (RuntimeError, ValueError):
            return  # lazy, sparse or without memory
        self.tensors.append(x)

    def _module(self, m: torch.nn.Module, path: str) -> None:
        held = vars(m)
        aside = type(m).__module__.partition(".")[0] in _ASIDE
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
            # of the model's flags a Trainer makes its own sense, see `changed`
            if key not in _MODULE or (key == "training" and id(m) not in self._own):
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
            keys = tuple(map(_key, x))
            self._watch(x)
            for i, (key, value) in enumerate(list(x.items())):
                name = repr(key) if type(key) in _ATOMS else f"#{i}"
                self.visit(value, f"{path}[{name}]", depth)
        elif isinstance(x, (set, frozenset)):
            keys = frozenset(map(_key, x))
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
        """An object with attributes; one that is none of the user's is told by its identity."""
        origin = _origin(type(x).__module__)
        plain = f"{type(x).__module__}.{type(x).__qualname__}" in _PLAIN
        state = _state(x)
        if state is not None:
            self.facts[path] = (Same(x), state)
            return
        if depth <= 0 or not (plain or origin in ("own", "package")):
            self.facts[path] = Same(x)
            return
        if not hasattr(x, "__dict__") and not hasattr(type(x), "__slots__"):
            self.facts[path] = Same(x)
            return
        self.facts[path] = Same(type(x))
        self.objects.append(x)
        for cls in type(x).__mro__ if origin == "own" else ():
            self._class(cls)
        self._attributes(x, path, depth - 1)

    def _attributes(self, x: Any, path: str, depth: int) -> None:
        held = getattr(x, "__dict__", None)
        if isinstance(held, dict):
            self._watch(held)
            for key, value in list(held.items()):
                self.visit(value, f"{path}.{key}", depth)
        for name in _slots(type(x)):
            self.slots.append((x, name))
            self.visit(getattr(x, name, None), f"{path}.{name}", depth)

    # ---- code

    def _function(self, x: Any, path: str, depth: int) -> None:
        if isinstance(x, types.FunctionType):
            self.facts[path] = Same(x)
            if _is_own(x):
                self._reads(x, path)
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
        """What a function of the user's own reads besides its arguments."""
        self._coded(x, path)
        self._called.update(_attribute_names(x.__code__))
        self.visit(x.__defaults__, f"{path}.__defaults__")
        self.visit(x.__kwdefaults__, f"{path}.__kwdefaults__")
        self._attributes(x, path, self.depth)
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:
                continue  # not assigned yet
            self.cells.append(cell)
            self.visit(content, f"{path}.{name}")
        for name in _global_names(x.__code__):
            self._global(x.__globals__, name, x.__module__, x.__code__)

    def _global(
        self, scope: Mapping[str, Any], name: str, place: str | None, code: types.CodeType
    ) -> None:
        """A name that the code reads; of a module of the user's, the names that it may mean."""
        if name not in scope:
            return  # a builtin
        self.names[id(scope), name] = scope
        value = scope[name]
        self.visit(value, f"{place}.{name}")
        if isinstance(value, types.ModuleType) and _origin(value.__name__) == "own":
            for attribute in _attribute_names(code):
                if not isinstance(vars(value).get(attribute), types.ModuleType):
                    self._global(vars(value), attribute, value.__name__, code)

    def _coded(self, x: types.FunctionType, path: str) -> None:
        self.facts[f"{path}.__code__"] = Same(x.__code__)
        self.functions.append(x)

    def _class(self, cls: type) -> None:
        """A class's attributes; the methods of the user's own are looked into where called."""
        if cls in self.classes or cls in _BASES:
            return
        path = f"{cls.__module__}.{cls.__qualname__}"
        if path in self.classes.values():
            path += f"#{len(self.classes)}"  # made anew, in a notebook or a function
        self.classes[cls] = path
        self.mappings.append(vars(cls))
        for key, x in list(vars(cls).items()):
            function = _underlying(x)
            if function is not None:
                self.facts[f"{path}.{key}"] = (Same(x), Same(function))
                if _is_own(function):
                    self._coded(function, f"{path}.{key}")
                    called = key.startswith("__") and key not in _NOT_CALLED
                    self._methods.append(("forward" if called else key, function, f"{path}.{key}"))
            elif not key.startswith("__") and not isinstance(x, types.MemberDescriptorType):
                self.visit(x, f"{path}.{key}", 1)


_PARTIAL = ("func", "args", "keywords")


def _underlying(x: Any) -> types.FunctionType | None:
    """The function of a method, class method, property and the like."""
    if isinstance(x, (staticmethod, classmethod)):
        x = x.__func__
    elif isinstance(x, property):
        x = x.fget
    elif isinstance(x, functools.cached_property):
        x = x.func
    return x if isinstance(x, types.FunctionType) else None


def _atom(x: Any) -> Any:
    """Of 1, 1.0 and True, of 0.0 and -0.0 no two are the same; a NaN is the same as a NaN."""
    return (type(x), x.hex() if isinstance(x, float) else repr(x) if type(x) is complex else x)


def _state(x: Any, depth: int = DEPTH) -> Any:
    """Where a source of values (random numbers, an iterator) stands, that the next one taken from
    it moves; None for what is none, or does not say."""
    if isinstance(x, random.Random) and not isinstance(x, random.SystemRandom):
        return x.getstate()
    if isinstance(x, np.random.Generator):
        return repr(x.bit_generator.state)
    if isinstance(x, np.random.RandomState):
        return repr(x.get_state(legacy=False))
    if isinstance(x, (bytearray, array.array)):
        return bytes(x) if len(x) <= BYTES else None
    if isinstance(x, io.IOBase):
        return x.tell() if not x.closed and x.readable() and x.seekable() else None
    if isinstance(x, queue.SimpleQueue):
        return x.qsize()
    if isinstance(x, contextvars.ContextVar):
        value = x.get(None)
        return _atom(value) if type(value) in _ATOMS else Same(value)
    if isinstance(x, types.GeneratorType):
        frame = x.gi_frame
        held = frame.f_locals if frame and depth else {}
        return (frame and frame.f_lasti, *((k, _state_of(v, depth)) for k, v in held.items()))
    if type(x).__module__ not in ("builtins", "itertools") or not isinstance(x, Iterator):
        return None
    if isinstance(x, itertools.count):
        return repr(x)
    left = length_hint(x, -1)
    if left >= 0 or not depth:
        return left
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.14 has it no longer
            _, *parts = x.__reduce__()  # type: ignore[misc]
    except (TypeError, ValueError, AttributeError):
        return None
    held = chain.from_iterable(x if isinstance(x, tuple) else (x,) for x in parts)
    return tuple(_state_of(v, depth) for v in held)


def _state_of(x: Any, depth: int) -> Any:
    return _atom(x) if type(x) in _ATOMS else _state(x, depth - 1)


def _key(x: Any) -> Any:
    return _atom(x) if type(x) in _ATOMS else Same(x)


@functools.lru_cache(maxsize=4096)
def _origin(module: str | None) -> str:
    """Whose code a module is: the user's "own", a "package"'s, or "opaque": not looked into."""
    if module is None or module.partition(".")[0] in _OPAQUE:
        return "opaque"
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None:
        return "own" if module == "__main__" else "opaque"
    return _place(file)


def _place(file: str) -> str:
    if "site-packages" in file or "dist-packages" in file:
        return "package"
    return "opaque" if file.startswith((_STANDARD, "<frozen")) else "own"


def _is_own(x: types.FunctionType) -> bool:
    top = (x.__module__ or "").partition(".")[0]
    return top not in _OPAQUE and _place(x.__code__.co_filename) == "own"


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code and those of the functions written in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    return tuple(
        {
            i.argval: None
            for part in _codes(code)
            for i in dis.get_instructions(part)
            if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")
        }
    )


@functools.lru_cache(maxsize=4096)
def _attribute_names(code: types.CodeType) -> tuple[str, ...]:
    return tuple({name: None for part in _codes(code) for name in part.co_names})


@functools.lru_cache(maxsize=4096)
def _slots(cls: type) -> tuple[str, ...]:
    held = [vars(c).get("__slots__", ()) for c in cls.__mro__ if _origin(c.__module__) != "opaque"]
    names = chain.from_iterable((h,) if isinstance(h, str) else h for h in held)
    return tuple(n for n in names if n not in ("__dict__", "__weakref__"))


class Sweep:
    """Whether what a walk saw is still there, object by object. All that is held is compared by
    identity, in passes that call no code of the user's: an `==` of tensors is none."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        self._scopes = list(walk.names.values())
        self._names = [name for _, name in walk.names]
        self._owners = [owner for owner, _ in walk.slots]
        self._slots = [name for _, name in walk.slots]
        self._sized = [*walk.mappings, *walk.sequences, *walk.long]
        self._sizes = list(map(len, self._sized))
        self._identities = [list(found) for found in self._held()]
        self._equals = [list(found) for found in self._told()]
        self._dtype, self._device = torch.get_default_dtype(), torch.get_default_device()

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self._walk.tensors

    def _held(self) -> Iterator[Iterable[Any]]:
        """What is to be the same objects. Of a mapping's keys the last will do: as many values in
        the same order under other names mean that one was put in, and new ones come last."""
        walk = self._walk
        yield chain.from_iterable(map(_values, walk.mappings))
        yield map(next, map(reversed, walk.mappings))  # type: ignore[call-overload]
        yield chain.from_iterable(walk.sequences)
        yield map(type, walk.objects)
        yield chain.from_iterable(map(_parts, walk.functions))
        yield map(_contents, walk.cells)
        yield map(_get, self._scopes, self._names)
        yield map(getattr, self._owners, self._slots, repeat(None))

    def _told(self) -> Iterator[Iterable[Any]]:
        """What is to be equal: plain values only."""
        walk = self._walk
        yield map(_form, walk.tensors)
        yield map(torch.Tensor.stride, walk.tensors)
        yield map(torch.Tensor.data_ptr, walk.tensors)
        yield (x.tobytes() for x in walk.arrays)

    def same(self) -> bool:
        walk = self._walk
        try:
            return (
                self._sizes == list(map(len, self._sized))
                and not any(walk.empty)
                and not any(map(_tensor_hooks, walk.tensors))
                and not any(map(_late_hooks, walk.tensors))
                and torch.get_default_dtype() == self._dtype
                and torch.get_default_device() == self._device
                and all(
                    all(map(is_, a, b)) for a, b in zip(self._held(), self._identities, strict=True)
                )
                and all(list(a) == b for a, b in zip(self._told(), self._equals, strict=True))
            )
        except (RuntimeError, ValueError):  # a cell that is empty now, a tensor without memory
            return False
