"""Guards: whether what a captured graph depends on, beyond the batch, is still what it was.

Seen, wherever the model, its loss function and what they hold lead:
  - parameters and buffers: which they are, dtype, shape, strides, `requires_grad`, ties, hooks;
  - submodules: which they are, their order and names, training flags, classes, hooks;
  - plain attributes: numbers, strings, flags, enums, containers, config objects, functions, partials,
    tensors and arrays; also of the plain objects that are held, up to `DEPTH` levels of objects;
  - code: a `forward` or another function replaced on an instance or a class, a function's own code,
    and for code outside of installed packages its defaults, its closure and the globals it names;
  - tensors that were baked in: also where they were written in place, however they are reached;
  - the default dtype and the default device.

Not seen:
  - elements beyond the first level of a container of more than `ELEMENTS` elements: only its length;
  - arrays of more than `BYTES` bytes edited in place; baked tensors as large, written past autograd's
    version counter (`.data`, `.numpy()`);
  - objects of extension types, of torch and of the standard library: only which object it is;
  - globals read by installed packages, files, environment variables, random state, the clock.

The check at each step compares object identities, in a few passes that stay within C. Only where
one differs is everything looked at anew and compared by value.
"""

from __future__ import annotations

import dis
import enum
import functools
import logging
import sys
import sysconfig
import types
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from operator import attrgetter, is_, methodcaller
from typing import Any

import numpy as np
import torch
from torch.optim import optimizer as optimizers

from onward.capture import refuse_surroundings
from onward.config import CaptureError

ELEMENTS = 1000  # a longer container is told by its length
BYTES = 1 << 16  # a larger array is told by its identity
DEPTH = 3  # plain objects within plain objects
OFTEN = 5  # changes of one attribute until a warning says what they cost

log = logging.getLogger("onward")

_ATOMS = (
    bool, int, float, complex, str, bytes, type(None), type(...), range, slice, torch.dtype,
    torch.device, torch.Size, torch.layout, torch.memory_format,
)  # fmt: skip
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, functools.partialmethod)
_STANDARD = sysconfig.get_paths()["stdlib"]
_OPAQUE = {  # packages whose objects are no part of a model: they count, log or hold data
    "torch", "onward", "accelerate", "comet_ml", "datasets", "lightning", "mlflow", "pandas",
    "pytorch_lightning", "rich", "tensorboard", "tensorboardX", "tokenizers", "torchmetrics", "tqdm",
    "wandb",
}  # fmt: skip
_PLAIN = {"types.SimpleNamespace", "argparse.Namespace"}
_BASES = (object, torch.nn.Module)
_NOT_CALLED = {"__init__", "__post_init__", "__repr__", "__str__", "__del__", "__reduce__"}
# of nn.Module's own attributes: looked at in a way of their own, or without meaning for a forward
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_MODULE = frozenset(torch.nn.Module().__dict__)
_OPTIMIZER_HOOKS = {
    "_optimizer_step_pre_hooks": "step pre-hook",
    "_optimizer_step_post_hooks": "step post-hook",
}

_ABSENT = object()
_values = methodcaller("values")
_get = dict.get
_contents = attrgetter("cell_contents")
_code = attrgetter("__code__")
_form = attrgetter("requires_grad", "dtype", "shape")  # another device is at another address
_tensor_hooks = attrgetter("_backward_hooks")
_late_hooks = attrgetter("_post_accumulate_grad_hooks")


def refuse_optimizer_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raises CaptureError for hooks around `optimizer.step()`: they may read gradients."""
    held = [(getattr(optimizer, name, {}), kind) for name, kind in _OPTIMIZER_HOOKS.items()]
    held += [
        (getattr(optimizers, "_global_optimizer_pre_hooks", {}), "global step pre-hook"),
        (getattr(optimizers, "_global_optimizer_post_hooks", {}), "global step post-hook"),
    ]
    for hooks, kind in held:
        for hook in hooks.values():
            name = getattr(hook, "__qualname__", type(hook).__qualname__)
            raise CaptureError(
                f"the optimizer has the {kind} {name}; the step is one graph, with no gradients to "
                "show between backward and update; fix: remove it, and call it around train_step"
            )


class Guards:
    """What the graphs of a model and its loss function depend on, as it was last seen."""

    def __init__(self) -> None:
        self._facts: dict[str, Any] = {}
        self._flags: dict[str, bool] = {}
        self._roots: tuple[Any, ...] = ()
        self._sweep: _Sweep | None = None
        self._unread = True  # whether the flags may be others than at the last training step
        self._baked: list[torch.Tensor] = []
        self._marks: list[int] = []
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._times: Counter[str] = Counter()

    def changed(self, model: torch.nn.Module, loss_fn: Any, training: bool) -> bool:
        """Whether graphs made before no longer say what these say; what is seen is then the new
        state. Raises CaptureError where the surroundings are not a graph's.

        training: whether a training step is asked for. Training flags matter only there; a model
        in evaluation mode counts as wholly in training mode, in which such a step puts it.
        """
        refuse_surroundings()
        roots = (model, loss_fn)
        same = self._sweep is not None and all(map(is_, self._roots, roots)) and self._sweep.same()
        kept = self._kept()
        if same and kept and not (training and self._unread):
            return False
        before = self._facts
        paths = [] if same else self._look(model, loss_fn)
        if not kept:
            paths.append("a tensor that the forward reads")
        self._unread = not training
        if training:
            paths += self._read_flags(model)
        if not paths:
            return False
        self._baked, self._marks, self._copies = [], [], []
        if before:
            self._count(paths)
        return True

    def _read_flags(self, model: torch.nn.Module) -> list[str]:
        """The paths of the flags that are others than at the last training step."""
        before = self._flags
        self._flags = {
            f"{name}.training": m.training or not model.training
            for name, m in model.named_modules(prefix="model")
        }
        return [n for n, flag in self._flags.items() if before and before.get(n) != flag]

    def settle(self, constants: Iterable[torch.Tensor]) -> None:
        """Takes the state after a capture as the one it saw: what the forward itself wrote while it
        was traced is no change. `constants`: the user's tensors that were baked in."""
        self._look(*self._roots)
        self._baked = list({id(t): t for t in (*self._baked, *constants)}.values())
        self._marks = list(map(_version, self._baked))
        small = [t for t in self._baked if t.layout is torch.strided and t.nbytes <= BYTES]
        copies = [(t, t.detach().clone()) for t in small]
        self._copies = [(t, copy) for t, copy in copies if torch.equal(t, copy)]  # NaN is not equal

    def _look(self, model: torch.nn.Module, loss_fn: Any) -> list[str]:
        """Looks at everything; the paths whose facts are others than before."""
        before, walk = self._facts, _Walk(model)
        walk.visit(model, "model")
        walk.visit(loss_fn, "loss_fn")
        walk.finish()
        after = walk.facts
        self._roots, self._facts, self._sweep = (model, loss_fn), after, _Sweep(walk)
        if before == after:
            return []
        paths = {**after, **before}
        return [n for n in paths if before.get(n, _ABSENT) != after.get(n, _ABSENT)]

    def _kept(self) -> bool:
        """Whether the baked tensors still hold what they held."""
        return list(map(_version, self._baked)) == self._marks and all(
            torch.equal(tensor, copy) for tensor, copy in self._copies
        )

    def _count(self, paths: Sequence[str]) -> None:
        log.debug("captured anew; changed: %s", ", ".join(paths[:8]))
        self._times.update(paths)
        for path in paths:
            if self._times[path] == OFTEN:
                log.warning(
                    "%s has changed %d times, and each time the model was captured anew; fix: make "
                    "it an input of the batch, or a buffer",
                    path,
                    OFTEN,
                )


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


class _Same:
    """Equal to another of the same object, which it keeps alive so that its id stays its own."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.held is self.held

    def __hash__(self) -> int:
        return id(self.held)

    def __repr__(self) -> str:
        return f"<{type(self.held).__qualname__} at {id(self.held):x}>"


class _Walk:
    """Visits what a model holds: `facts` by path, compared by value, and what to watch."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.facts: dict[str, Any] = {}
        self.mappings: list[Mapping[Any, Any]] = []
        self.sequences: list[Any] = []
        self.empty: list[Any] = []  # what holds nothing, and is to stay so
        self.long: list[Any] = []
        self.tensors: list[torch.Tensor] = []
        self.arrays: list[np.ndarray[Any, Any]] = []
        self.functions: list[types.FunctionType] = []
        self.cells: list[types.CellType] = []
        self.names: list[tuple[Mapping[str, Any], str]] = []  # globals that are read
        self.slots: list[tuple[Any, str]] = []
        self.objects: list[Any] = []  # whose class may be set
        self._own = {id(m) for m in model.modules()}
        self._seen: dict[int, tuple[str, Any]] = {}  # id -> path, and the object to keep its id
        self._classes: dict[type, str] = {}
        self._called: set[str] = {"forward"}
        self._methods: list[tuple[str, types.FunctionType, str]] = []

    def finish(self) -> None:
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

    def visit(self, x: Any, path: str, depth: int = DEPTH) -> None:
        """Takes note of `x`, which stands at `path`, and of what it holds."""
        if type(x) in _ATOMS:
            self.facts[path] = _atom(x)
            return
        if isinstance(x, np.generic):
            self.facts[path] = (type(x), x.tobytes())
            return
        if isinstance(x, (enum.Enum, type, types.ModuleType)):
            self.facts[path] = _Same(x)
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

    # ---- tensors and modules

    def _tensor(self, x: torch.Tensor, path: str) -> None:
        self.facts[path] = (_Same(x), type(x), x.requires_grad, x.dtype, x.device, x.layout)
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(x, name, None)
            if hooks:
                self.facts[f"{path}.{name}"] = tuple(map(_Same, hooks.values()))
        try:
            x.data_ptr()
            self.facts[f"{path}.shape"] = (tuple(x.shape), x.stride())
        except (RuntimeError, ValueError):
            return  # lazy, sparse or without memory
        self.tensors.append(x)

    def _module(self, m: torch.nn.Module, path: str) -> None:
        held = vars(m)
        if type(m).__module__.partition(".")[0] in _OPAQUE - {"torch", "onward"}:
            self.facts[path] = _Same(m)
            return
        self.facts[path] = (_Same(m), _Same(type(m)), tuple(held.get("_modules", ())))
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
                self.facts[f"{path}.{name}"] = tuple(map(_Same, hooks.values()))
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
        if len(x) > ELEMENTS:
            keys = _Same(x)
            self.long.append(x)
        elif isinstance(x, (dict, types.MappingProxyType)):
            keys = tuple(map(_key, x))
            self._watch(x)
            for key, value in list(x.items()):
                self.visit(value, f"{path}[{key!r}]", depth)
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
        if x.dtype.hasobject or x.nbytes > BYTES:
            self.facts[path] = (_Same(x), x.dtype, x.shape)
            return
        self.facts[path] = (x.dtype, x.shape, x.tobytes())
        self.arrays.append(x)

    def _object(self, x: Any, path: str, depth: int) -> None:
        """An object with attributes; one that is none of the user's is told by its identity."""
        origin = _origin(type(x).__module__)
        plain = f"{type(x).__module__}.{type(x).__qualname__}" in _PLAIN
        if depth <= 0 or not (plain or origin in ("own", "package")):
            self.facts[path] = _Same(x)
            return
        if not hasattr(x, "__dict__") and not hasattr(type(x), "__slots__"):
            self.facts[path] = _Same(x)
            return
        self.facts[path] = _Same(type(x))
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
            self.facts[path] = _Same(x)
            if _is_own(x):
                self._reads(x, path)
            return
        self.facts[path] = type(x)
        parts = ("__self__", "__func__") if isinstance(x, types.MethodType) else _PARTIAL
        for name in parts:
            self.visit(getattr(x, name), f"{path}.{name}", depth)

    def _reads(self, x: types.FunctionType, path: str) -> None:
        """What a function of the user's own reads besides its arguments."""
        self._coded(x, path)
        self._called.update(_attribute_names(x.__code__))
        self.visit(x.__defaults__, f"{path}.__defaults__")
        self.visit(x.__kwdefaults__, f"{path}.__kwdefaults__")
        self._attributes(x, path, DEPTH)
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
        self.names.append((scope, name))
        value = scope[name]
        self.visit(value, f"{place}.{name}")
        if isinstance(value, types.ModuleType) and _origin(value.__name__) == "own":
            for attribute in _attribute_names(code):
                if attribute in vars(value) and not isinstance(vars(value)[attribute], types.ModuleType):
                    self._global(vars(value), attribute, value.__name__, code)

    def _coded(self, x: types.FunctionType, path: str) -> None:
        self.facts[f"{path}.__code__"] = _Same(x.__code__)
        self.functions.append(x)

    def _class(self, cls: type) -> None:
        """A class's attributes; the methods of the user's own are looked into where called."""
        if cls in self._classes or cls in _BASES:
            return
        path = f"{cls.__module__}.{cls.__qualname__}"
        if path in self._classes.values():
            path += f"#{len(self._classes)}"  # made anew, in a notebook or a function
        self._classes[cls] = path
        self.mappings.append(vars(cls))
        for key, x in list(vars(cls).items()):
            function = _underlying(x)
            if function is not None:
                self.facts[f"{path}.{key}"] = (_Same(x), _Same(function))
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


def _key(x: Any) -> Any:
    return _atom(x) if type(x) in _ATOMS else _Same(x)


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


def _columns(pairs: list[tuple[Any, str]]) -> tuple[list[Any], list[str]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


class _Sweep:
    """Whether what a walk saw is still there, object by object. All that is held is compared by
    identity, in passes that call no code of the user's: an `==` of tensors is none."""

    def __init__(self, walk: _Walk) -> None:
        self._walk = walk
        self._scopes, self._names = _columns(walk.names)
        self._owners, self._slots = _columns(walk.slots)
        self._sized = [*walk.mappings, *walk.sequences, *walk.long]
        self._sizes = list(map(len, self._sized))
        self._identities = [list(found) for found in self._held()]
        self._equals = [list(found) for found in self._told()]
        self._dtype, self._device = torch.get_default_dtype(), torch.get_default_device()

    def _held(self) -> Iterator[Iterable[Any]]:
        """What is to be the same objects. Of a mapping's keys the last will do: as many values in
        the same order under other names mean that one was put in, and new ones come last."""
        walk = self._walk
        yield chain.from_iterable(map(_values, walk.mappings))
        yield map(next, map(reversed, walk.mappings))  # type: ignore[call-overload]
        yield chain.from_iterable(walk.sequences)
        yield map(type, walk.objects)
        yield map(_code, walk.functions)
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
                and all(all(map(is_, a, b)) for a, b in zip(self._held(), self._identities))
                and all(list(a) == b for a, b in zip(self._told(), self._equals))
            )
        except (RuntimeError, ValueError):  # a cell that is empty now, a tensor without memory
            return False
