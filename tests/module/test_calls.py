"""What is given to an accelerated model, and what it returns, against eager PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import RETURNS, Keywords, Nested, Positional, Record, Returns, W
from torch.utils import _pytree as pytree
from twins import Twins, total

from onward.errors import EagerWarning


def x(seed: int = 0, rows: int = 3) -> torch.Tensor:
    return torch.randn(rows, W, generator=torch.Generator().manual_seed(seed))


CALLS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "one positional": (Positional, lambda m: m(x())),
    "two positional": (Positional, lambda m: m(x(), x(1))),
    "three positional": (Positional, lambda m: m(x(), x(1), 0.5)),
    "keywords": (Positional, lambda m: m(y=x(1), x=x())),
    "keywords in another order": (Positional, lambda m: m(scale=2.0, x=x(), y=x(1))),
    "positional and keyword": (Positional, lambda m: m(x(), y=x(1))),
    "a default given": (Positional, lambda m: m(x(), None, 1.0)),
    "none": (Positional, lambda m: m(x(), y=None)),
    "an int for a float": (Positional, lambda m: m(x(), scale=3)),
    "var args": (Keywords, lambda m: m(x(), x(1), x(2))),
    "var keywords": (Keywords, lambda m: m(first=x(), second=x(1))),
    "var keywords unordered": (Keywords, lambda m: m(second=x(1), first=x())),
    "both, a flag and a number": (Keywords, lambda m: m(x(), first=x(1), go=True, times=2)),
    "the flag off": (Keywords, lambda m: m(x(), first=x(1), go=False, times=2)),
    "a string": (Keywords, lambda m: m(x(), how="so")),
    "list": (Nested, lambda m: m([x(), x(1)])),
    "list with none": (Nested, lambda m: m([x(), None, x(1)])),
    "tuple in list": (Nested, lambda m: m([(x(), x(1)), x(2)])),
    "dict": (Nested, lambda m: m({"a": x(), "b": x(1)})),
    "dict with none": (Nested, lambda m: m({"a": x(), "n": None})),
    "dict of lists, and more": (Nested, lambda m: m({"a": [x(), {"c": x(1)}]}, more={"d": x(2)})),
    "bools and bytes": (Nested, lambda m: m([x() > 0, (x(1) * 10).to(torch.uint8)])),
    "whole numbers": (Nested, lambda m: m([(x() * 10).long(), (x(1) * 9).int()])),
    "transposed": (Positional, lambda m: m(x(rows=W).t())),
    "strided": (Positional, lambda m: m(torch.cat([x(), x(1)], 1)[:, ::2])),
    "expanded": (Positional, lambda m: m(x(rows=1).expand(4, W), x(1).mean(0))),
    "one row": (Positional, lambda m: m(x(rows=1))),
    "three dims": (Positional, lambda m: m(x(rows=4).view(2, 2, W))),
    "the same twice": (Positional, lambda m: m(t := x(), t)),
}


@pytest.mark.parametrize("call", CALLS)
def test_call_styles(call: str) -> None:
    kind, act = CALLS[call]
    twins = Twins(kind())
    twins.step(act)
    assert twins.ran()


def test_one_model_many_calls() -> None:
    """The graphs of all these calls live side by side, each met twice."""
    for kind in (Positional, Keywords, Nested):
        twins = Twins(kind())
        for _ in range(2):
            for cls, act in CALLS.values():
                if cls is kind:
                    twins.zero()
                    twins.step(act)


@pytest.mark.parametrize("kind", RETURNS)
def test_returned_containers(kind: str) -> None:
    twins = Twins(Returns(kind))
    if kind == "dataclass":
        ours, eager = twins.each(lambda m: m(x()))
        assert type(ours) is type(eager) is Record
        assert (ours.name, ours.extra) == (eager.name, eager.extra)
        torch.testing.assert_close(ours.value, eager.value)
        return
    for seed in range(3):
        twins.zero()
        twins.step(lambda m, s=seed: m(x(s, rows=3 + s)))
    with torch.no_grad():
        twins.same(lambda m: m(x(9)))
    assert twins.ran()


@pytest.mark.parametrize("kind", ["input", "parameter", "twice"])
def test_a_tensor_that_is_handed_on_is_the_same_tensor(kind: str) -> None:
    twins = Twins(Returns(kind))
    given = x()
    found = twins.ours(given)
    if kind == "input":
        assert found["x"] is given
    elif kind == "parameter":
        assert found["w"] is twins.ours.a.weight
        assert found["table"] is twins.ours.table
    else:
        assert found["h"] is found["again"]


class Odd:
    """No container that anybody knows."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class ReturnsOdd(Positional):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return Odd(super().forward(x))


def test_an_unknown_container_runs_in_eager_and_says_why() -> None:
    twins = Twins(ReturnsOdd())
    with pytest.warns(EagerWarning, match="returns a Odd, which is neither a tensor nor"):
        found = twins.ours(x())
    torch.testing.assert_close(found.value, twins.eager(x()).value)
    twins.ours(x())  # said once: a warning would be an error here
    assert not twins.ran()


def test_an_unknown_argument_runs_in_eager_and_says_why() -> None:
    twins = Twins(Keywords())
    with pytest.warns(EagerWarning, match="an argument is a Odd"):
        twins.ours(x(), what=Odd(x()))


def test_a_dtype_without_a_graph_runs_in_eager_and_says_why() -> None:
    twins = Twins(Nested())
    with pytest.warns(EagerWarning, match="weights and batches have to be torch.float32"):
        twins.same(lambda m: m([x().half(), x(1)]))


def test_sizes_change_from_call_to_call() -> None:
    twins = Twins(Positional())
    for rows in (3, 5, 2, 7, 3):
        twins.zero()
        twins.step(lambda m, r=rows: m(x(rows=r)))


def test_python_values_are_part_of_the_graph() -> None:
    twins = Twins(Positional())
    for scale in (1.0, 2.0, 1, True, 2.0, -0.0, 0.0):
        twins.zero()
        twins.step(lambda m, s=scale: m(x(), scale=s))


def test_dtypes_change_from_call_to_call() -> None:
    twins = Twins(Nested())
    for dtype in (torch.float32, torch.int64, torch.bool, torch.float32):
        twins.step(lambda m, d=dtype: m([x().to(d)]))


def test_outputs_are_nobody_else_s_memory() -> None:
    """Written over by their caller, they change no later call, and no gradient."""
    twins = Twins(Returns("tuple"))
    first = twins.ours(x())
    total(first).backward()
    want = [p.grad.clone() for p in twins.ours.parameters() if p.grad is not None]
    twins.zero()
    second = twins.ours(x())
    kept = [t.detach().clone() for t in pytree.tree_leaves(first)]
    loss = total(second)
    with torch.no_grad():
        for t in pytree.tree_leaves(second):
            t.detach().fill_(7.0)
    loss.backward()
    found = [p.grad for p in twins.ours.parameters() if p.grad is not None]
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)
    for a, b in zip(pytree.tree_leaves(first), kept, strict=True):
        assert torch.equal(a, b)
