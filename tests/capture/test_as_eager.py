"""A forward that asks where it is, or what its tensors and sizes are, hears what eager tells it."""

from __future__ import annotations

import copy
import numbers
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling, is_exporting
from torch.fx import _symbolic_trace
from torch.jit import _trace

import onward
from onward.capture.trace.as_eager import (
    _COMPILERS,
    _LAYOUT,
    _CompilerAnswer,
    _of_compilers,
    _Type,
)
from onward.model_state.patches import look

ROWS = {n: torch.randn(n, 8, generator=torch.Generator().manual_seed(n)) for n in (1, 3, 4)}
LABELS = torch.arange(8) % 5
# Batches of several sizes and memory layouts.
BATCHES = [
    ROWS[4], ROWS[3], ROWS[3].t().contiguous().t(), torch.cat([ROWS[4], ROWS[3]])[4:], ROWS[4],
    ROWS[3].t().contiguous().t(), ROWS[1],
]  # fmt: skip
STRIDE = torch.Tensor.stride  # taken before any capture
Ask = Callable[["Net", torch.Tensor], Any]

ASKS: dict[str, Ask] = {
    "torch.compiler.is_compiling": lambda m, x: torch.compiler.is_compiling(),
    "torch.compiler.is_exporting": lambda m, x: torch.compiler.is_exporting(),
    "torch.compiler.is_dynamo_compiling": lambda m, x: torch.compiler.is_dynamo_compiling(),
    "torch._dynamo.is_compiling": lambda m, x: torch._dynamo.is_compiling(),
    "torch.fx.is_fx_tracing": lambda m, x: _symbolic_trace.is_fx_tracing(),
    "is_compiling by name": lambda m, x: is_compiling(),
    "is_exporting by name": lambda m, x: is_exporting(),
    "torch.jit.is_tracing": lambda m, x: _trace.is_tracing(),
    "torch.onnx.is_in_onnx_export": lambda m, x: torch.onnx.is_in_onnx_export(),
    "type of the batch": lambda m, x: type(x) is torch.Tensor,
    "type of a parameter": lambda m, x: type(m.b.weight) is nn.Parameter,
    "type of a result": lambda m, x: type(m.b(x)) is torch.Tensor,
    "name of a type": lambda m, x: type(x).__name__ == "Tensor",
    "type among types": lambda m, x: type(x) in (torch.Tensor, list),
    "type of a size": lambda m, x: type(x.shape[0]) is int,
    "type of a shape": lambda m, x: type(x.shape) is torch.Size,
    "type of a module": lambda m, x: type(m.b) is nn.Linear,
    "type of a number": lambda m, x: type(len(m._modules) / 2) is float,
    "a type": lambda m, x: isinstance(nn.Linear, type) and not isinstance(x, type),
    "a new type": lambda m, x: type("New", (), {"x": 1}).x == 1,  # type: ignore[attr-defined]
    "isinstance int": lambda m, x: isinstance(x.shape[0], int),
    "isinstance of two": lambda m, x: isinstance(x.size(0), (int, float)),
    "isinstance of a union": lambda m, x: isinstance(x.size(0), int | str),
    "isinstance Integral": lambda m, x: isinstance(x.size(0), numbers.Integral),
    "isinstance bool": lambda m, x: isinstance(x.size(0), bool),
    "isinstance SymInt": lambda m, x: isinstance(x.size(0), torch.SymInt),
    "isinstance Tensor": lambda m, x: isinstance(x, torch.Tensor),
    "isinstance Parameter": lambda m, x: isinstance(m.b.weight, nn.Parameter),
    "no Parameter": lambda m, x: isinstance(x, nn.Parameter),
    "isinstance FloatTensor": lambda m, x: isinstance(x, torch.FloatTensor),
    "str of a size": lambda m, x: str(x.shape[0]) == "3",
    "repr of a size": lambda m, x: repr(x.shape[0]) == "3",
    "size in an f-string": lambda m, x: f"{x.shape[0]}" == "3",
    "size with a format": lambda m, x: f"{x.shape[0]:03d}" == "003",
    "size by %": lambda m, x: "%d" % x.shape[0] == "3",  # noqa: UP031
    "repr of a shape": lambda m, x: "3" in repr(x.shape),
    "size among sizes": lambda m, x: x.shape[0] in (3, 5),
    "range of a size": lambda m, x: len(range(x.shape[0])) == 3,
    "a shape": lambda m, x: x.shape == (3, 8),
    "is_contiguous": lambda m, x: x.is_contiguous(),
    "stride": lambda m, x: x.stride()[0] == 8,
    "stride of a dim": lambda m, x: x.stride(1) == 1,
    "storage_offset": lambda m, x: x.storage_offset() == 0,
    "dim_order": lambda m, x: x.dim_order() == (0, 1),
    "stride of a result": lambda m, x: (x * 2).stride(0) == 8,
    "is_leaf": lambda m, x: x.is_leaf,
    "requires_grad": lambda m, x: m.b(x).requires_grad,
    "requires_grad of a parameter": lambda m, x: m.b.weight.requires_grad,
    "grad_fn": lambda m, x: m.b(x).grad_fn is not None,
    "type of a grad_fn": lambda m, x: type(m.b(x).grad_fn).__name__ == "AddmmBackward0",
    "name of a grad_fn": lambda m, x: "Addmm" in m.b(x).grad_fn.name(),  # type: ignore[union-attr]
    "next_functions": lambda m, x: len(m.b(x).grad_fn.next_functions) == 3,  # type: ignore
    "is_inference_mode_enabled": lambda m, x: torch.is_inference_mode_enabled(),
    "is_grad_enabled": lambda m, x: torch.is_grad_enabled(),
    "unbound size": lambda m, x: torch.Tensor.size(x, 0) == 3,
    "unbound shape": lambda m, x: torch.Tensor.shape.__get__(x) == (3, 8),  # type: ignore
    "unbound is_contiguous": lambda m, x: torch.Tensor.is_contiguous(x),
    "unbound stride": lambda m, x: torch.Tensor.stride(x)[0] == 8,
    "unbound stride of a dim": lambda m, x: torch.Tensor.stride(x, 1) == 1,
    "unbound stride by name": lambda m, x: STRIDE(x)[0] == 8,
    "unbound storage_offset": lambda m, x: torch.Tensor.storage_offset(x) == 0,
    "unbound dim_order": lambda m, x: torch.Tensor.dim_order(x) == (0, 1),
    "unbound stride of a parameter": lambda m, x: torch.Tensor.stride(m.b.weight) == (8, 1),
    "unbound stride of Parameter": lambda m, x: nn.Parameter.stride(x)[0] == 8,  # type: ignore
    "unbound requires_grad": lambda m, x: torch.Tensor.requires_grad.__get__(m.b(x)),  # type: ignore
    "unbound str of a size": lambda m, x: torch.Tensor.size(x, 0).__str__() == "3",
    "device": lambda m, x: x.device.type == "cpu" and x.is_cpu and not x.is_meta,
}  # fmt: skip


class Net(nn.Module):
    def __init__(self, ask: Ask) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.ask = ask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.b(x)
        if self.ask(self, x):
            h = h * 3
        return self.head(torch.tanh(self.a(x)) + h)


def follow(model: nn.Module, times: int = 1) -> onward.Trainer:
    """The Trainer after steps whose losses equal those of eager PyTorch."""
    twin = copy.deepcopy(model)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    trainer = onward.Trainer(model, ours, loss_fn=F.cross_entropy)
    for x in BATCHES * times:
        theirs.zero_grad()
        loss = F.cross_entropy(twin(x), LABELS[: len(x)])
        loss.backward()
        theirs.step()
        assert trainer.train_step(x, LABELS[: len(x)]).loss == pytest.approx(loss.item(), rel=1e-5)
    return trainer


@pytest.mark.sample(3)
@pytest.mark.parametrize("ask", ASKS)
def test_answers_are_those_of_eager_mode(ask: str) -> None:
    follow(Net(ASKS[ask]))


def test_who_does_not_ask_how_a_batch_lies_in_memory_is_captured_once(
    captures: list[int],
) -> None:
    follow(Net(lambda m, x: x.shape[0] > 0), 2)
    assert len(captures) == 2  # one row is a case of its own
    follow(Net(ASKS["is_contiguous"]), 2)
    assert len(captures) == 2 + 4  # three layouts, and one row


MODES: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {}


def mode(function: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Any:
    MODES[function.__name__] = function
    return function


@mode
def inference_mode(b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return b(x)


@mode
def inference_mode_then_clone(b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        h = b(x)
    return h.clone() * 2


@mode
def inference_mode_as_a_decorator(b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.inference_mode()(b)(x)


@mode
def inference_mode_off(b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode(False):
        return b(x)


@mode
def inference_mode_off_within_no_grad(b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.inference_mode(False):
        return b(x)


@mode
def inference_mode_and_a_question(b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        h = b(x) * (3 if torch.is_inference_mode_enabled() else 1)
        with torch.inference_mode(False):
            return h.clone() * (5 if torch.is_inference_mode_enabled() else 1)


@mode
def enable_grad_within_no_grad(b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.enable_grad():
        return b(x)


@mode
def set_grad_enabled(b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.set_grad_enabled(False)
    h = b(x)
    torch.set_grad_enabled(True)
    return h


@mode
def no_grad_as_a_decorator(b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.no_grad()(b)(x)


@mode
def detached_and_a_leaf(b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return b(x).detach().requires_grad_(True)


@mode
def asked_of_what_has_one(b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return b(x).requires_grad_(True)


@mode
def save_on_cpu(b: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autograd.graph.save_on_cpu():
        return b(x)


class Moded(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.head = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 5)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.a(x)) + MODES[self.how](self.b, x))


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", MODES)
def test_gradients_stop_where_they_stop_in_eager_mode(how: str) -> None:
    follow(Moded(how))


def test_a_parameter_that_is_frozen_through_the_class_is_refused() -> None:
    def freeze(m: Net, x: torch.Tensor) -> None:
        torch.Tensor.requires_grad_(m.b.weight, False)
        m.b(x)
        torch.Tensor.requires_grad_(m.b.weight)

    with pytest.raises(onward.CaptureError, match="switches requires_grad of a parameter"):
        follow(Net(freeze))


def test_nothing_stays_answered_otherwise() -> None:
    """What a capture replaces is there again, also where the forward raises."""
    inference = torch.inference_mode
    places = [(FakeTensor, n) for n in ("grad_fn", "requires_grad")]
    places += [(torch.Tensor, n) for n in ("requires_grad_", *_LAYOUT)]
    places += [(torch.SymInt, n) for n in ("__repr__", "__str__", "__format__")]
    places += [(inference, "__enter__"), (inference, "__exit__"), (globals(), "is_compiling")]
    places += [(globals(), n) for n in ("type", "isinstance")]
    places += [(p, n) for p, n, _ in _of_compilers(lambda: True)]
    before = [look(*place) for place in places]
    follow(Net(ASKS["is_compiling by name"]))
    with pytest.raises(onward.CaptureError):
        follow(Net(lambda m, x: x.sum().item() > 0))
    assert all(look(*place) is found for place, found in zip(places, before, strict=True))


def test_every_way_to_ask_torch_is_there() -> None:
    """Every name that a capture replaces exists in torch; patching one that is gone would do
    nothing."""
    for place, names in _COMPILERS.items():
        assert all(hasattr(sys.modules[place], name) for name in names if place in sys.modules)


def test_code_in_another_thread_hears_that_nothing_is_compiled() -> None:
    """torch's flag that an export is running is one for all threads; other threads must not see
    it."""
    found: list[bool] = []
    answer = _CompilerAnswer(asked=lambda: False, plain=lambda: True)
    thread = threading.Thread(target=lambda: found.append(answer()))
    thread.start()
    thread.join()
    assert answer() and found == [False]


class Beside(nn.Module):
    """A module that asks in another thread, in each run and in the trace, and writes what it hears
    to a pipe."""

    def __init__(self, ask: Ask, pipe: int) -> None:
        super().__init__()
        self.net, self.ask, self.pipe = Net(lambda m, x: True), ask, pipe

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        thread = threading.Thread(target=self._tell)
        thread.start()
        thread.join()
        return self.net(x)

    def _tell(self) -> None:
        heard = self.ask(PLAIN, ROWS[3])
        os.write(self.pipe, b"T" if heard else b"F")


PLAIN = Net(lambda m, x: True)
FROM_A_THREAD = (
    "torch.compiler.is_compiling", "torch.compiler.is_exporting", "torch._dynamo.is_compiling",
    "torch.jit.is_tracing", "is_compiling by name", "is_exporting by name", "type of the batch",
    "type among types", "isinstance int", "unbound stride", "requires_grad", "is_grad_enabled",
)  # fmt: skip


@pytest.mark.parametrize("name", FROM_A_THREAD)
def test_a_thread_beside_a_trace_hears_what_it_hears_in_eager_mode(name: str) -> None:
    read, write = os.pipe()
    model = Beside(ASKS[name], write)
    trainer = onward.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=F.cross_entropy
    )
    trainer.train_step(ROWS[3], LABELS[:3])
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        assert set(pipe.read()) == set(b"T" if ASKS[name](PLAIN, ROWS[3]) else b"F")


def test_what_stands_for_type_is_equal_to_it_and_serves_as_a_base() -> None:
    scope: dict[str, Any] = {"type": _Type}
    exec("class Meta(type): pass\nclass Made(metaclass=Meta): pass", scope)
    assert isinstance(scope["Made"], scope["Meta"]) and scope["Meta"].__mro__[1] is type
    stand: Any = _Type
    assert type in (stand,) and {stand: 1}[type(nn.Linear)] == 1
    assert stand.__name__ == "type" and stand.mro(bool) == [bool, int, object]
    assert isinstance(nn.Linear, stand) and not isinstance(3, stand)
    assert stand(3) is int and stand("New", (), {}).__name__ == "New"
