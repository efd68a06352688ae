"""Forwards that ask for autocast's state or for a tensor's type, and may do something else then:
a trace takes the branch that eager PyTorch takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twins import Twins

import onward
from onward.errors import CaptureError, EagerWarning
from onward.graph.graph import array_of
from onward.module import accelerated

LOW = (torch.bfloat16, torch.float16)


def is_low(x: torch.Tensor) -> bool:
    return x.dtype in LOW


class Asks(nn.Module):
    """A model whose forward is the method named `form`."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
        self.form = form
        self.constants = [torch.zeros(16), torch.ones(16)]

    def forward(self, x: torch.Tensor) -> Any:
        return getattr(self, self.form)(x)

    def state(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(h.tanh() if torch.is_autocast_enabled("cpu") else h)

    def state_as_a_factor(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x) * (3 if torch.is_autocast_enabled("cpu") else 1))

    def type_of_autocast(self, x: torch.Tensor) -> torch.Tensor:
        on = torch.is_autocast_enabled("cpu")
        low = on and torch.get_autocast_dtype("cpu") in LOW
        return self.b(self.a(x) + (2.0 if low else 0.0))

    def state_in_a_block(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(x)
            h = h.tanh() if torch.is_autocast_enabled("cpu") else h
            return self.b(h)

    def state_where_it_is_off(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        with torch.autocast("cpu", enabled=False):
            return self.b(h.float() * (3 if torch.is_autocast_enabled("cpu") else 1))

    def type(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(h * (3 if is_low(h) else 1))

    def type_picks_a_function(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(F.gelu(h) if is_low(h) else F.relu(h))

    def type_in_a_block(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.a(x)
            return self.b(h * (3 if is_low(h) else 1))

    def type_by_string(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(-h if str(h.dtype).endswith("16") else h)

    def bytes_of_a_number(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(h * h.element_size())

    def places(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(h).narrow(0, 1 if is_low(h) else 2, 3)

    def layers(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.a(h) if is_low(h) else self.b(h)

    def first_layer(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(x) if torch.is_autocast_enabled("cpu") else self.a(x)

    def tables(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(h + self.constants[int(is_low(h))])

    def operands(self, x: torch.Tensor) -> torch.Tensor:
        h, g = self.a(x), self.b(x)
        return self.b(h - g.tanh() if is_low(h) else g - h.tanh())

    def order(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        g = h.tanh()
        return self.b(h - g if is_low(h) else g - h)

    def transposed(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)[:, :6]
        return (h.real if is_low(h) else h.T) @ x

    def written(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h = h.clone()
        h[:, 0 if is_low(h) else 3] = 5.0
        return self.b(h)

    def a_slice(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h = h.clone()
        h[: 2 if is_low(h) else 4] = 5.0
        return self.b(h)

    def result(self, x: torch.Tensor) -> Any:
        h = self.a(x)
        return {"y": self.b(h), "low": is_low(h)}

    def checkpointed(self, x: torch.Tensor) -> torch.Tensor:
        def part(y: torch.Tensor) -> torch.Tensor:
            h = self.a(y)
            return h * (3 if is_low(h) else 1)

        return self.b(checkpoint(part, x, use_reentrant=False))

    def set_by_hand(self, x: torch.Tensor) -> torch.Tensor:
        before = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        try:
            h = self.a(x)
        finally:
            torch.set_autocast_enabled("cpu", before[0])
            torch.set_autocast_dtype("cpu", before[1])
        return self.b((h * (3 if is_low(h) else 1)).float())

    def smallest(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(h + torch.finfo(h.dtype).eps * 100)

    # `h.float()` is a copy under autocast, and `h` itself without

    def copy_is_written(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        g = h.float()
        g.add_(1.0)
        return self.b(h) + g

    def copied_is_written(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        g = h.to(torch.float32)
        h.mul_(2.0)
        return self.b(h) + g

    def view_of_a_copy(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h.to(torch.float32).view(-1)[:20] = 3.0
        return self.b(h)

    def added_to_a_copy(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        g = h.type(torch.float32)
        g += 1.0
        return self.b(h)

    def masked_copy(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        g = torch.as_tensor(h, dtype=torch.float32)
        g[g > 0] = 0.0
        return self.b(h)

    def activated_copy(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        g = F.relu(h.type_as(x), inplace=True)
        return self.b(h) + g

    def data_of_a_low_one(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if is_low(h):
            h.data = h.data * 2
        return self.b(h)

    # methods from here on call the same functions with and without autocast

    def limit(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return h.masked_fill(x > 0, torch.finfo(h.dtype).min).softmax(-1)

    def cast_where_low(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(h.float() if is_low(h) else h)

    def cast_back(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(h.float().square().mean(-1, keepdim=True).rsqrt().to(h.dtype) * h)

    def only_the_copy_is_read(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x).float()
        h.add_(1.0)
        h[h > 0] = 0.0
        return self.b(h)

    def copy_before_a_write(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        h.mul_(2.0)
        return self.b(h.float()) + h

    def kept_type(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(torch.zeros(16, dtype=h.dtype) + h)


FORMS = [n for n, f in vars(Asks).items() if callable(f) and n != "forward" and n[0] != "_"]
# why a form is refused under autocast, and without it
REFUSED = {"data_of_a_low_one": "written through"}
REFUSED_WITHOUT = {"set_by_hand": "weights and batches have"}


def gaussian(seed: int = 0) -> torch.Tensor:
    return torch.randn(6, 16, generator=torch.Generator().manual_seed(seed))


def called(twins: Twins, to: torch.dtype | None, seed: int) -> None:
    """Assert that results and gradients are eager's, in eager's dtypes."""
    found = []
    twins.zero()
    for model in twins.both:
        with torch.autocast("cpu", to or torch.bfloat16, enabled=to is not None):
            y = model(gaussian(seed))
        tensor = y["y"] if isinstance(y, dict) else y
        tensor.float().square().mean().backward()
        found.append((y, tensor))
    (ours, a), (eager, b) = found
    assert a.dtype == b.dtype
    torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
    if isinstance(eager, dict):
        assert ours["low"] == eager["low"]
    for p, q in zip(twins.ours.parameters(), twins.eager.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if p.grad is not None and q.grad is not None:
            room = 0.05 * float(q.grad.abs().max())
            torch.testing.assert_close(p.grad, q.grad, rtol=0.05, atol=room)


@pytest.mark.sample(3)
@pytest.mark.parametrize("first", [None, *LOW], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_each_state_as_in_eager_mode(form: str, first: torch.dtype | None) -> None:
    twins = Twins(Asks(form).train())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerWarning)
        for turn, to in enumerate((first, *LOW, None, *LOW)):
            called(twins, to, turn)


@pytest.mark.sample(3)
@pytest.mark.parametrize("low", [None, *LOW], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_captured(form: str, low: torch.dtype | None) -> None:
    model = onward.accelerate(Asks(form).train(), strict=True)
    said = (REFUSED if low is not None else REFUSED_WITHOUT).get(form)
    with torch.autocast("cpu", low or torch.bfloat16, enabled=low is not None):
        if said is None:
            model(gaussian())
        else:
            with pytest.raises(CaptureError, match=rf"{said} .*; fix: "):
                model(gaussian())


def test_what_hides_a_score_in_fp16_hides_it_in_the_graph() -> None:
    """A score is hidden in the graph by fp32's least number, which kernels and row demand look for;
    fp16 lacks it."""
    model = onward.accelerate(Asks("limit").train(), strict=True)
    with torch.autocast("cpu", torch.float16):
        model(gaussian())
    held = accelerated(model)
    assert held is not None
    values = [v for node in held.last_call().captured.graph for v in node.inputs if v is not None]
    least = [float(a.min()) for v in values if (a := array_of(v)) is not None and a.size]
    assert min(least) == torch.finfo(torch.float32).min


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "RNN": lambda: nn.RNN(16, 16, batch_first=True),
    "GRU": lambda: nn.GRU(16, 16, batch_first=True),
    "GRU of two layers": lambda: nn.GRU(16, 16, 2, batch_first=True, bidirectional=True),
    "LSTM": lambda: nn.LSTM(16, 16, batch_first=True),
    "LSTM projected": lambda: nn.LSTM(16, 16, batch_first=True, proj_size=4),
}


class Kept(nn.Module):
    """A model of one op that a trace keeps whole as a custom op; its results have eager's
    dtypes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        if kind in LAYERS:
            self.layer = LAYERS[kind]()

    def forward(self, x: torch.Tensor, *states: Any) -> dict[str, Any]:
        if self.kind in LAYERS:
            y, state = self.layer(x[None], *states)
            states = state if isinstance(state, tuple) else (state,)
            named = {f"state {i}": s for i, s in enumerate(states)}
            return {"y": y, **named, "low": is_low(y)}
        probs = x[:, None, :].to(torch.get_autocast_dtype("cpu")).log_softmax(-1)
        lengths = torch.tensor([6]), torch.tensor([2])
        y = F.ctc_loss(probs, torch.ones(1, 2, dtype=torch.int64), *lengths)
        return {"y": y, "low": is_low(y)}


def assert_kept(kind: str, *given: Any) -> None:
    twins = Twins(Kept(kind).train(), strict=True)
    with torch.autocast("cpu", torch.bfloat16):
        ours, eager = twins.each(lambda m: m(*given))
    assert ours.keys() == eager.keys() and ours["low"] == eager["low"]
    for name in ours.keys() - {"low"}:
        assert ours[name].dtype == eager[name].dtype
        torch.testing.assert_close(ours[name], eager[name], rtol=0.05, atol=0.05)


def test_a_loss_that_a_trace_keeps_whole() -> None:
    assert_kept("ctc", gaussian())


@pytest.fixture
def without_onednn() -> Iterator[None]:
    """Switch oneDNN off: under autocast its LSTM needs a processor with 16-bit products, or
    raises."""
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    yield
    torch._C._set_mkldnn_enabled(before)


@pytest.mark.usefixtures("without_onednn")
@pytest.mark.filterwarnings("ignore:LSTM with projections:UserWarning")
@pytest.mark.parametrize("state", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("to", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", LAYERS)
def test_results_of_recurrent_layers(kind: str, to: torch.dtype, state: torch.dtype | None) -> None:
    x = gaussian().to(to)
    if state is None:
        return assert_kept(kind, x)
    count = 4 if kind == "GRU of two layers" else 1
    widths = (4, 16) if kind == "LSTM projected" else (16, 16)
    states = tuple(torch.zeros(count, 1, width, dtype=state) for width in widths)
    return assert_kept(kind, x, states if kind.startswith("LSTM") else states[0])


class LowGradient(torch.autograd.Function):
    """A function whose backward returns the gradient in the dtype of what arrived."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        return g @ weight.to(g.dtype).T, None


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.LayerNorm(16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return self.b(LowGradient.apply(h, self.b.weight))


def test_a_gradient_of_another_type_is_cast_as_autograd_casts_it() -> None:
    twins = Twins(Own().train(), strict=True)
    called(twins, torch.bfloat16, 0)
