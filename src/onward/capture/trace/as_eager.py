"""Gives the model's code the answers of eager mode while it is traced.

In a trace `type(x)` is not `torch.Tensor`, a size is not an `int`, and
`torch.compiler.is_compiling()` is true, so that a forward that asks might take another branch than
in eager mode. Within this context the model's code gets the answers of eager mode; code of torch
and transformers, which is written for traces, gets the true ones.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from onward.capture.masked_rows import MaskedRows
from onward.capture.mode_reads import noted_question
from onward.errors import CaptureError
from onward.model_state import Walk, library, module_of
from onward.model_state.patches import Patch, caller, patched

_FOR_TRACES = {"functorch", "onward", "sympy", "torch", "transformers"}
_COMPILERS = {
    "torch.compiler": ("is_compiling", "is_exporting"),
    "torch._dynamo": ("is_compiling",),
    "torch._dynamo.external_utils": ("is_compiling",),
    "torch._utils": ("is_compiling",),
    "torch.fx._symbolic_trace": ("is_fx_tracing",),
}
_NODE_HOOKS = ("register_hook", "register_prehook")
_LAYOUT = ("dim_order", "is_contiguous", "stride", "storage_offset")
_NUMBERS: dict[type, type] = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
_TENSOR: Any = torch._C.TensorBase
_here = threading.local()


@contextmanager
def called_in_inference_mode(on: bool) -> Iterator[None]:
    """A context in which this thread captures a call that was made in inference mode, if `on`."""
    _here.inference = on
    try:
        yield
    finally:
        _here.inference = False


def is_of_inference_mode() -> bool:
    """Returns whether this thread captures a call that was made in inference mode."""
    return getattr(_here, "inference", False)


@contextmanager
def answering_as_eager(seen: Walk, trained: Iterable[torch.Tensor], note: _Note) -> Iterator[None]:
    """A context in which this thread's forward gets the answers of eager mode.

    seen: a walk of the model. trained: the trace's tensors for its parameters, empty without a
    backward. note: called with method and answer where the forward asks for a memory layout.

    Within it the forward raises CaptureError where it sets a hook on an autograd node, or switches
    a parameter's `requires_grad` temporarily.
    """
    here = threading.get_ident()

    def asked() -> bool:
        """Returns whether the model's code is asking, in the traced thread."""
        if threading.get_ident() != here:
            return False
        name = caller().f_globals.get("__name__") or ""
        return not _is_for_traces(name)

    tensors = list(_of_tensors(asked, note))
    grad_mode = list(_of_grad_mode())
    known_as = {id(getattr(owner, name)): tell for owner, name, tell in (*tensors, *grad_mode)}
    places = [
        *tensors,
        *_of_gradients(asked, {id(t) for t in trained}),
        *_of_sizes(asked),
        *_of_compilers(asked),
        *_of_inference_mode(),
        *grad_mode,
    ]
    for scope in _scopes(seen):
        places += [(scope, n, x) for n, x in _BUILTINS.items() if n not in scope]
        held = list(scope.items())
        places += [(scope, n, _no) for n, x in held if _is_of_compiler(x)]
        places += [(scope, n, known_as[id(x)]) for n, x in held if id(x) in known_as]
    with patched(places):
        yield


_Asked = Callable[[], bool]
_Note = Callable[[str, Any], None]


def _scopes(seen: Walk) -> Iterator[dict[str, Any]]:
    """Yields the globals of the model's code: its functions' and its classes' packages'."""
    tops = {module_of(c).partition(".")[0] for c in seen.classes} - _FOR_TRACES
    tops -= sys.stdlib_module_names - {"__main__"}
    found = [f.__globals__ for f in seen.functions]
    named = [(n, m) for n, m in list(sys.modules.items()) if n.partition(".")[0] in tops and m]
    found += [vars(m) for n, m in named if not _is_for_traces(n)]
    return iter({id(scope): scope for scope in found}.values())


def _is_for_traces(module: str) -> bool:
    """Returns whether a module is written for traces, also in a vendored copy of transformers."""
    return module.partition(".")[0] in _FOR_TRACES or library(module) in _FOR_TRACES


def _of_tensors(asked: _Asked, note: _Note) -> Iterator[Patch]:
    """Yields patches of `torch.Tensor` itself, so that `torch.Tensor.stride(x)` is noted too."""

    def of_layout(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def tell(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            answer = plain(x, *args, **kwargs)
            if asked():
                note(name, answer)
            return answer

        return tell

    for name in _LAYOUT:
        yield torch.Tensor, name, of_layout(name, getattr(torch.Tensor, name))


def _of_gradients(asked: _Asked, trained: set[int]) -> Iterator[Patch]:
    changed: dict[int, bool] = {}  # id -> new value; function modes may set the same value twice
    grad_fn, requires_grad = _TENSOR.grad_fn.__get__, _TENSOR.requires_grad.__get__

    def node(x: torch.Tensor) -> Any:
        noted_question()
        found = grad_fn(x)
        return _Node(found) if trained and found is not None and asked() else found

    plain = torch.Tensor.requires_grad_

    def check(x: torch.Tensor, value: bool) -> None:
        if id(x) not in trained or value == requires_grad(x):
            return
        if changed.setdefault(id(x), value) != value:  # a lasting change is seen in the model
            raise CaptureError(
                "the forward switches requires_grad of a parameter temporarily, which a "
                "graph cannot do; fix: use p.detach() instead"
            )

    def require(x: torch.Tensor, value: bool) -> None:
        check(x, value)
        _TENSOR.requires_grad.__set__(x, value)

    def require_(x: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        check(x, requires_grad)
        return plain(x, requires_grad)  # which accepts the present value for a computed tensor

    def asks(x: torch.Tensor) -> bool:
        noted_question()
        return requires_grad(x)

    yield FakeTensor, "grad_fn", property(node)
    yield FakeTensor, "requires_grad", property(asks, require)
    yield torch.Tensor, "requires_grad_", require_


def _of_sizes(asked: _Asked) -> Iterator[Patch]:
    """Yields patches that specialize a symbolic size to its number where it is formatted."""

    def as_text(name: str, plain: Callable[..., str]) -> Callable[..., str]:
        def tell(n: torch.SymInt, *spec: str) -> str:
            return getattr(int, name)(int(n), *spec) if asked() else plain(n, *spec)

        return tell

    for name in ("__repr__", "__str__", "__format__"):
        yield torch.SymInt, name, as_text(name, getattr(torch.SymInt, name))


class _CompilerAnswer:
    """Replaces a function of torch that says whether code is being compiled.

    torch has one flag for all threads, so this replacement acts in all threads: to another thread,
    which runs in eager PyTorch, it answers False."""

    def __init__(self, asked: _Asked, plain: Callable[[], bool]) -> None:
        self._asked, self._plain, self._thread = asked, plain, threading.get_ident()

    def __call__(self) -> bool:
        return threading.get_ident() == self._thread and not self._asked() and self._plain()


def _of_compilers(asked: _Asked) -> Iterator[Patch]:
    """Yields patches of torch's functions that say whether code is being compiled."""

    def answer(plain: Callable[[], bool]) -> _CompilerAnswer:
        return _CompilerAnswer(asked, plain)

    for place, names in _COMPILERS.items():
        for name in names if place in sys.modules else ():
            yield sys.modules[place], name, answer(getattr(sys.modules[place], name))


def _of_grad_mode() -> Iterator[Patch]:
    enabled = torch.is_grad_enabled

    def is_grad_enabled() -> bool:
        noted_question(depth=3)  # the frame above the wrapper from `patched`
        return enabled()

    yield torch, "is_grad_enabled", is_grad_enabled


def _of_inference_mode() -> Iterator[Patch]:
    """Yields patches that make a trace record `torch.inference_mode` as gradients being off."""
    mode = torch.inference_mode
    entered: list[tuple[Any, bool]] = []

    def enter(context: Any) -> None:
        entered.append((torch.set_grad_enabled(not context.mode), context.mode))

    def leave(context: Any, *error: Any) -> None:
        entered.pop()[0].__exit__(*error)

    def enabled() -> bool:
        noted_question(depth=3)
        return entered[-1][1] if entered else is_of_inference_mode()

    yield mode, "__enter__", enter
    yield mode, "__exit__", leave
    yield torch, "is_inference_mode_enabled", enabled


def _class_of(x: Any) -> type:
    """Returns the class that an object of the trace has in eager mode."""
    if type(x) is FakeTensor or type(x) is MaskedRows:
        return torch.nn.Parameter if isinstance(x, torch.nn.Parameter) else torch.Tensor
    return x.__class__ if type(x) is _Node else _NUMBERS.get(type(x), type(x))


class _TypeOfType(type):
    """The metaclass that makes `_Type` equal to `type`, with its attributes, and `type` itself as a
    base of a new metaclass."""

    def __new__(cls, name: str, bases: tuple[Any, ...], names: dict[str, Any], **more: Any) -> Any:
        if not bases:
            return super().__new__(cls, name, bases, names)
        return type(name, tuple(type if b is _Type else b for b in bases), names, **more)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        return _class_of(args[0]) if len(args) == 1 and not kwargs else type(*args, **kwargs)

    def __getattribute__(cls, name: str) -> Any:
        return getattr(type, name)

    def __getitem__(cls, item: Any) -> Any:
        return type[item]

    def __eq__(cls, other: object) -> bool:
        return other is type or other is _Type

    def __hash__(cls) -> int:
        return hash(type)

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, type)

    def __subclasscheck__(cls, x: type) -> bool:
        return issubclass(x, type)


class _Type(metaclass=_TypeOfType):
    """Replaces `type` in the model's code: a tensor of the trace is a `torch.Tensor`, a size an
    `int`."""


def _isinstance(x: Any, cls: Any) -> bool:
    """Replaces `isinstance` in the model's code: a size is an `int`."""
    return issubclass(_NUMBERS[type(x)], cls) if type(x) in _NUMBERS else isinstance(x, cls)


_BUILTINS: dict[str, Any] = {"type": _Type, "isinstance": _isinstance}


class _Node:
    """A node of autograd's graph that raises CaptureError where a hook is set on it."""

    def __init__(self, node: Any) -> None:
        self._node = node

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        return type(self._node)

    @property
    def next_functions(self) -> tuple[tuple[Any, int], ...]:
        return tuple((n and _Node(n), i) for n, i in self._node.next_functions)

    def __getattr__(self, name: str) -> Any:
        if name in _NODE_HOOKS:
            raise CaptureError(
                f"the forward calls {name} on a grad_fn, and hooks do not run inside a graph; "
                "fix: remove the hook"
            )
        return getattr(self._node, name)


class _No:
    """Replaces a function that says whether code is being compiled in the model's globals, where
    it was imported by name; acts in all threads."""

    def __call__(self) -> bool:
        return False


_no = _No()


def _is_of_compiler(x: Any) -> bool:
    """Returns whether an object is a function of torch that says whether code is being compiled,
    under any name."""
    return isinstance(x, types.FunctionType) and x.__name__ in _COMPILERS.get(x.__module__, ())


__all__ = ["answering_as_eager", "called_in_inference_mode", "is_of_inference_mode"]
