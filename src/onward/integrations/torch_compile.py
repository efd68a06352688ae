"""The backend `torch.compile(model, backend="onward")`: runs torch.compile's graphs as Onward's.

torch.compile passes one FX graph for each piece of a forward between graph breaks, with parameters
and buffers as arguments. Each graph becomes an accelerated module. Tensors that the model holds are
bound to that module, so that their sizes are fixed and their gradients known; all else stays an
argument. One graph may serve several modules of a class, each through a module of its own.

`onward.accelerate` is preferable: it sees the whole forward and its outputs by name, and so skips
outputs that nobody reads and rows that no output needs.

torch finds the name through its entry point group `torch_dynamo_backends`. In a checkout that is
not installed, call `register()`, or pass the function:
`torch.compile(model, backend=onward_backend)`.
"""

from __future__ import annotations

import dataclasses
import gc
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo import trace_rules
from torch._dynamo.backends import registry

from onward.errors import CaptureError, EagerWarning, OnwardError, check_names
from onward.forks import Lock
from onward.integrations.compiled_piece import CompiledPiece
from onward.module import accelerate, eager
from onward.options import ModuleOptions

NAME = "onward"
KEPT = 128  # modules that one graph serves, such as the layers of a model
OFTEN = 3  # replacements of a buffer after which it is treated as an argument
_GRAPH = "_graph_of_torch_compile"  # a name beside the paths of the user's model


def onward_backend(
    graph: fx.GraphModule, examples: Sequence[Any], **settings: Any
) -> Callable[..., Any]:
    """The backend function, which torch.compile calls for each graph; returns the replacement to
    run.

    settings: `options`, the fields of `onward.ModuleOptions`. An invalid setting raises OnwardError
    when the compiled function is called, since torch.compile would wrap an error raised here.
    """
    _leave_to_python()
    try:
        options = _options(**settings)
    except OnwardError as error:
        refusal = error  # Python deletes the name `error` after the block

        def refused(*_: Any) -> Any:
            raise OnwardError(str(refusal))

        return refused
    return CompiledGraph(CompiledPiece.of(graph, examples), options)


def register() -> None:
    """Registers the name "onward" with torch.compile, unless an installed entry point has."""
    if NAME in registry.list_backends(exclude_tags=()):
        return
    registry.register_backend(compiler_fn=onward_backend, name=NAME)


@cache
def _leave_to_python() -> None:
    """Stops torch.compile from compiling Onward's own code, which autograd calls where a compiled
    function runs a backward."""
    trace_rules.add("onward")


def _options(
    options: Mapping[str, Any] | None = None, mode: str | None = None, **others: Any
) -> ModuleOptions:
    strange = [f"mode={mode!r}"] if mode is not None else []
    strange += [f"{name}={value!r}" for name, value in others.items()]
    if strange:
        raise OnwardError(
            f'torch.compile({", ".join(strange)}) is not supported by the backend "onward"; '
            'fix: leave it out, and use options={"strict": True} and the like'
        )
    given = dict(options or {})
    known = [field.name for field in dataclasses.fields(ModuleOptions)]
    check_names("torch.compile's options", "option", [str(name) for name in given], known)
    found = ModuleOptions(**given)
    if found.outputs == "loss":
        raise OnwardError(
            "outputs='loss' is not supported under torch.compile, whose graphs do not name "
            "their outputs; fix: onward.accelerate(model, outputs='loss')"
        )
    return found


class _Part(nn.Module):
    """A node in the tree of a `_Bound`'s tensors, at the paths that they have in the model."""


class _Bound(_Part):
    """A graph with the tensors of one module; called with the other inputs, in order."""

    def __init__(self, piece: CompiledPiece, held: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self.add_module(_GRAPH, piece.graph)
        self.count = piece.count
        self.unread = piece.sizes
        self.places: dict[int, tuple[str, str]] = {}
        for i, tensor in held.items():
            self.places[i] = self._hold(piece.held[i], f"held_{i}", tensor)

    def _hold(self, path: str, other: str, tensor: torch.Tensor) -> tuple[str, str]:
        """Registers the tensor at its path in the model or, if that is taken, under another name.
        Returns the path of its module and its name there."""
        *modules, name = path.split(".")
        module: nn.Module = self
        for part in modules:
            if part not in module._modules:
                if hasattr(module, part):
                    return self._hold(other, other, tensor)
                module.add_module(part, _Part())
            module = module.get_submodule(part)
        if hasattr(module, name):
            return self._hold(other, other, tensor)
        if isinstance(tensor, nn.Parameter):
            module.register_parameter(name, tensor)
        else:
            module.register_buffer(name, tensor)
        return ".".join(modules), name

    def forward(self, *given: Any) -> Any:
        rest = iter(given)
        inputs = []
        for i in range(self.count):
            if i in self.places:
                path, name = self.places[i]
                inputs.append(getattr(self.get_submodule(path), name))
            else:
                inputs.append(None if i in self.unread else next(rest))
        return getattr(self, _GRAPH)(*inputs)


class CompiledGraph:
    """The callable that torch.compile calls with all inputs of a graph.

    Bound modules are found by the tensors that they hold. One is dropped when the model's module
    that holds its tensors is gone.
    """

    def __init__(self, piece: CompiledPiece, options: ModuleOptions) -> None:
        self._piece, self._options = piece, options
        self._held = tuple(piece.held)
        self._bound: OrderedDict[tuple[int, ...], _Bound] = OrderedDict()
        self._replaced: Counter[int] = Counter()
        self._told: set[str] = set()
        self._lock = Lock()

    def __call__(self, *inputs: Any) -> Any:
        try:
            if self._piece.refusal is not None:
                raise CaptureError(self._piece.refusal)
            if self._piece.computes_nothing:
                return self._piece.eager.forward(*inputs)
            with self._lock:
                bound = self._find(inputs)
            return self._piece.with_outside(bound(*self._rest(inputs, bound)), inputs)
        except CaptureError as error:
            if self._options.strict:
                raise
            self._tell(str(error))
        with eager():
            return self._piece.eager.forward(*inputs)

    def _rest(self, inputs: Sequence[Any], bound: _Bound) -> Iterator[Any]:
        piece = self._piece
        for i, given in enumerate(inputs):
            if i not in bound.places and i not in piece.sizes:
                yield given.item() if i in piece.floats else given

    def _find(self, inputs: Sequence[Any]) -> _Bound:
        """The module that holds these tensors, made if there is none."""
        key = tuple([id(inputs[i]) for i in self._held])
        bound = self._bound.get(key)
        if bound is None:
            key = self._without_replaced(inputs, key)
            bound = self._bound[key] = self._bind(inputs, key)
            while len(self._bound) > KEPT:
                self._bound.popitem(last=False)
        else:
            self._bound.move_to_end(key)
        return bound

    def _without_replaced(self, inputs: Sequence[Any], key: tuple[int, ...]) -> tuple[int, ...]:
        """The key without buffers that each call replaces; from now on these are arguments."""
        parameters = self._piece.parameters
        for known in list(reversed(self._bound)):  # a copy, since a finalizer may remove elements
            pairs = list(zip(self._held, known, key, strict=True))
            if all(a == b for i, a, b in pairs if i in parameters):
                self._replaced.update(i for i, a, b in pairs if a != b)
                break
        often = {i for i, times in self._replaced.items() if times >= OFTEN}
        if not often & set(self._held):
            return key
        self._held = tuple(i for i in self._held if i not in often)
        self._bound.clear()
        return tuple([id(inputs[i]) for i in self._held])

    def _bind(self, inputs: Sequence[Any], key: tuple[int, ...]) -> _Bound:
        held = {i: inputs[i] for i in self._held}
        bound = _Bound(self._piece, held)
        # warned of here, with the graph's line
        options = dataclasses.replace(self._options, strict=True)
        accelerate(bound, **vars(options))
        # watch the model's module, not the parameter, which this module keeps alive
        first = next((t for t in held.values() if isinstance(t, nn.Parameter)), None)
        owner = None if first is None else _owner(first)
        if owner is not None:
            weakref.finalize(owner, _drop, weakref.ref(self), key).atexit = False
        return bound

    def _tell(self, reason: str) -> None:
        if reason in self._told:
            return
        self._told.add(reason)
        warnings.warn(
            f"the torch.compile graph of {self._piece.where} runs in eager PyTorch: {reason}",
            EagerWarning,
            stacklevel=3,
        )


def _drop(graph: weakref.ref[CompiledGraph], key: tuple[int, ...]) -> None:
    held = graph()
    if held is not None:
        held._bound.pop(key, None)


def _owner(parameter: nn.Parameter) -> nn.Module | None:
    """A module of the user's that holds the parameter; torch.compile does not say which."""
    for found in gc.get_objects():
        if issubclass(type(found), nn.Module) and not isinstance(found, _Part):
            held = vars(found).get("_parameters") or {}
            if any(p is parameter for p in held.values()):
                return found
    return None


__all__ = ["CompiledGraph", "onward_backend", "register"]
