"""Tensors of unusual kinds as inputs: eager's numbers, and where no graph takes them, eager itself
with its reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from models import Base, Nested, Positional, W
from torch import nn
from twins import Twins, total

import onward
from onward.errors import EagerWarning
from onward.module import accelerated


def x(seed: int = 0, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, W, generator=torch.Generator().manual_seed(seed))


class Sub(torch.Tensor):
    pass


class Lazy:
    """No tensor, and yet what torch's functions take."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        plain = [a.held if isinstance(a, Lazy) else a for a in args]
        return function(*plain, **(kwargs or {}))


class Linear(Base):
    def forward(self, x: Any) -> torch.Tensor:
        return nn.functional.linear(torch.mul(x, 2.0), self.a.weight)


class Complex(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(x * 2j).sum() * self.a(x.real)


class Sparse(Base):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(x, self.a.weight)


class Ids(Base):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, W)
        self.register_buffer("shift", torch.ones(W))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.a(self.table(ids))


def tagged() -> torch.Tensor:
    made: Any = x()
    made.tag = 3
    return made


def of_inference() -> torch.Tensor:
    with torch.inference_mode():
        return x()


def complex_x() -> torch.Tensor:
    return torch.complex(x(), x(1))


Case = tuple[type, Callable[[Any], Any]]
GRAPH: dict[str, Case] = {
    "no rows": (Positional, lambda m: m(x()[:0])),
    "no rows of three dims": (Positional, lambda m: m(torch.empty(0, 2, W))),
    "no ids": (Ids, lambda m: m(torch.empty(0, 3, dtype=torch.int64))),
    "negative by a flag": (Positional, lambda m: m(complex_x().conj().imag)),
    "a number as a tensor": (Positional, lambda m: m(x(), torch.tensor(2.0))),
    "the model's own weight": (Positional, lambda m: m(m.a.weight)),
    "a row of the model's weight": (Positional, lambda m: m(x(), m.a.weight[0])),
    "the model's own buffer": (Nested, lambda m: m([x(), m.a.bias])),
    "a parameter of nobody": (Positional, lambda m: m(x(), nn.Parameter(torch.ones(W)))),
    "detached from a graph": (Positional, lambda m: m((x().requires_grad_() * 2).detach())),
    "of a strange layout": (Positional, lambda m: m(x(rows=8).view(2, 4, W).permute(1, 0, 2))),
    "overlapping": (Positional, lambda m: m(torch.arange(8.0).as_strided((3, W), (1, 1)))),
    "views of one tensor": (Positional, lambda m: m((t := x(rows=5))[:3], t[2:])),
    "shared memory": (Positional, lambda m: m(x().share_memory_())),
}
EAGER: dict[str, tuple[type, Callable[[Any], Any], str]] = {
    "a subclass": (Positional, lambda m: m(x().as_subclass(Sub)), "of Sub, a subclass"),
    "torch functions": (Linear, lambda m: m(Lazy(x())), "a Lazy, neither a tensor nor"),
    "complex": (Complex, lambda m: m(complex_x()), "complex64, which is not supported"),
    "sparse": (Sparse, lambda m: m(x(rows=W).to_sparse()), "layout torch.sparse_coo"),
    "half": (Nested, lambda m: m([x().half()]), "weights and batches have to be"),
    "8 bits": (Nested, lambda m: m([x().to(torch.int8)]), "int8, which is not supported"),
    "16 bits": (
        Nested, lambda m: m([(x().abs() * 9).to(torch.uint16)]), "uint16, which is not supported",
    ),
    "numpy's number": (Positional, lambda m: m(x(), scale=np.float32(2)), "a float32, neither"),
    "with an attribute": (Positional, lambda m: m(tagged()), "a tensor with the attribute tag"),
    "an iterator": (Nested, lambda m: m([x(), iter([1])]), "a list_iterator, neither a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("kind", GRAPH)
def test_as_a_graph(kind: str) -> None:
    model, act = GRAPH[kind]
    twins = Twins(model())
    for _ in range(2):
        twins.zero()
        twins.step(act)
    assert twins.ran()


@pytest.mark.parametrize("kind", EAGER)
def test_in_eager_with_a_reason(kind: str) -> None:
    model, act, why = EAGER[kind]
    twins = Twins(model())
    with pytest.warns(EagerWarning, match=why) as told:
        twins.step(act)
        twins.step(act)
    assert len([w for w in told if w.category is EagerWarning]) == 1
    assert not twins.ran()


REFUSED: dict[str, Callable[[Any], Any]] = {
    "meta": lambda m: m(x().to("meta")),
    "numpy": lambda m: m(x().numpy()),
    "ids that no table has": lambda m: m(torch.tensor([[7]])),
    "no arguments": lambda m: m(),
    "too many": lambda m: m(x(), x(), x(), x(), x()),
    "unknown": lambda m: m(x(), nothing=3),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_eager_refuses_is_refused_alike(kind: str) -> None:
    twins = Twins(Ids() if "ids" in kind else Positional())
    errors = []
    for model in twins.both:
        with pytest.raises((RuntimeError, TypeError, IndexError)) as error:
            out = REFUSED[kind](model)
            total(out).backward()
        errors.append(error.value)
    assert type(errors[0]) is type(errors[1])


def test_tensors_of_inference_mode_as_inputs() -> None:
    """Eager may not save them for its backward; a graph has its own copy."""
    twins = Twins(Positional())
    found = twins.ours(of_inference())
    torch.testing.assert_close(found, twins.eager(x()))
    total(found).backward()
    total(twins.eager(x())).backward()
    twins.same_gradients()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_default_device(device: str) -> None:
    """Before, within and after; tensors that the forward makes lie there."""

    class Makes(Positional):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(x) + torch.ones(W)

    twins = Twins(Makes())
    twins.step(lambda m: m(x()))
    for model in twins.both:
        with torch.device(device):
            if device == "meta":
                with pytest.raises(RuntimeError, match="meta"):
                    model(x()).sum()
            else:
                model(x())
    twins.zero()
    twins.step(lambda m: m(x()))
    torch.set_default_device("cpu")
    try:
        twins.step(lambda m: m(x()))
    finally:
        torch.set_default_device(None)


def test_a_default_dtype() -> None:
    class Makes(Positional):
        def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
            return super().forward(x) + torch.full((W,), 0.5)

    twins = Twins(Makes())
    dtypes = []
    for dtype in (torch.float32, torch.float64, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            dtypes.append(twins.step(lambda m: m(x().float())).dtype)
        finally:
            torch.set_default_dtype(torch.float32)
    assert dtypes == [torch.float32, torch.float64, torch.float32]


def test_modes_that_watch_go_around_the_graph() -> None:
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode

    class Functions(TorchFunctionMode):
        def __torch_function__(self, f: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            seen.append(getattr(f, "__name__", ""))
            return f(*args, **(kw or {}))

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, f: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            seen.append(str(f))
            return f(*args, **(kw or {}))

    twins = Twins(Positional())
    for mode in (Functions, Operators):
        told = []
        for model in twins.both:
            seen: list[str] = []
            given = x()
            with warnings.catch_warnings(), mode():
                model(given)
            told.append(seen)
        assert told[0] == told[1] and told[0]
    held = accelerated(onward.accelerate(twins.ours))
    assert held is not None and held._last is None
