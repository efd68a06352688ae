"""Sums of gradients of several precisions: which are written as one op, and what they compute."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tiny
import torch
from ml_dtypes import bfloat16
from torch import nn

import onward
from onward.graph.build import Builder
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role, Value
from onward.graph.types import DType, parse_type
from onward.rewrite.run import FusionPass, run
from onward.rewrite.wide_sum import wide_sum

TYPES = {
    "a": "bf16[6,4]", "b": "bf16[6,4]", "c": "bf16[2,3,4]", "h": "f16[6,4]", "r": "f32[6,4]",
    "s": "f32[6,4]", "row": "bf16[4]", "d": "f64[6,4]",
}  # fmt: skip
Values = dict[str, Value]
Write = Callable[[Builder, Values], Value | tuple[Value, ...]]


def wide(b: Builder, x: Value) -> Value:
    return b.cast(x, DType.FLOAT)


def of(*names: str) -> Write:
    """The sum of these inputs from left to right, each cast to f32."""

    def write(b: Builder, v: Values) -> Value:
        first, *others = (wide(b, v[name]) for name in names)
        for x in others:
            first = b.Add(first, x)
        return first

    return write


def to_the_right(b: Builder, v: Values) -> Value:
    return b.Add(wide(b, v["a"]), b.Add(wide(b, v["b"]), v["r"]))


def reshaped(b: Builder, v: Values) -> Value:
    """A term and a sum that are reshaped on their way."""
    inner = b.Add(b.reshape(wide(b, v["a"]), (2, 3, 4)), wide(b, v["c"]))
    return b.Add(v["r"], b.reshape(inner, (6, 4)))


def read_twice(b: Builder, v: Values) -> Value:
    """A sum that another node reads too stays, as a term."""
    inner = b.Add(wide(b, v["a"]), wide(b, v["b"]))
    return b.Mul(b.Add(inner, v["r"]), inner)


def result_too(b: Builder, v: Values) -> tuple[Value, ...]:
    inner = b.Add(wide(b, v["a"]), v["s"])
    return b.Add(inner, v["r"]), inner


def cast_read_twice(b: Builder, v: Values) -> tuple[Value, ...]:
    cast = wide(b, v["a"])
    return b.Add(cast, v["r"]), b.Exp(cast)


def with_itself(b: Builder, v: Values) -> Value:
    cast = wide(b, v["a"])
    return b.Add(cast, cast)


def broadcast(b: Builder, v: Values) -> Value:
    return b.Add(wide(b, v["row"]), v["r"])


def double(b: Builder, v: Values) -> Value:
    return b.Add(b.cast(v["a"], DType.DOUBLE), v["d"])


# name -> what is written, and the terms of each WideSum that the pass makes of it
SUMS: dict[str, tuple[Write, list[int]]] = {
    "one of each": (of("a", "r"), [2]),
    "one of each, f32 first": (of("r", "a"), [2]),
    "three products and a residual": (of("a", "b", "a", "r"), [4]),
    "a residual first": (of("r", "a", "b"), [3]),
    "low ones only": (of("a", "b"), [2]),
    "fp16": (of("h", "r"), [2]),
    "to the right": (to_the_right, [3]),
    "reshaped": (reshaped, [3]),
    "read twice": (read_twice, [2]),
    "a result too": (result_too, [2]),
    "a cast that is read twice": (cast_read_twice, [2]),
    "with itself": (with_itself, [2]),
    "eight terms": (of(*"abababrs"), [8]),
    "f32 only": (of("r", "s"), []),
    "two low types": (of("a", "h"), []),
    "broadcast": (broadcast, []),
    "fp64": (double, []),
}


def program(write: Write) -> Graph:
    graph = Graph("f")
    v = {n: graph.input(n, parse_type(t), Role.BATCH) for n, t in TYPES.items()}
    made = write(Builder(graph), v)
    results = made if isinstance(made, tuple) else (made,)
    graph.outputs = {f"y{i}": y for i, y in enumerate(results)}
    return graph


def feeds() -> dict[str, np.ndarray]:
    rng, made = np.random.default_rng(3), {}
    numpy = {"bf16": bfloat16, "f16": np.float16, "f32": np.float32, "f64": np.float64}
    for name, text in TYPES.items():
        kind, _, sizes = text.partition("[")
        shape = [int(n) for n in sizes.rstrip("]").split(",")]
        made[name] = rng.standard_normal(shape).astype(numpy[kind])
    return made


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_one_op_and_the_same_numbers(name: str) -> None:
    write, terms = SUMS[name]
    graph = program(write)
    before = evaluate(graph, feeds())
    after, [report] = run(graph, [FusionPass(wide_sum)], verify=True)
    made = [n for n in after if n.op_type == "WideSum"]
    assert sorted(len(n.inputs) for n in made) == sorted(terms)
    assert report.edits == len(terms)
    found = evaluate(after, feeds())
    for key, want in before.items():
        np.testing.assert_allclose(found[key], want, rtol=1e-6, atol=1e-6)
    lefts = [n for n in after if n.op_type == "Add"]
    assert len(lefts) == len([n for n in graph if n.op_type == "Add"]) - sum(t - 1 for t in terms)


def test_nine_terms_are_left_and_nothing_unread_stays() -> None:
    """More terms than the op takes stay Adds; casts that a WideSum reads through are gone."""
    after, [report] = run(program(of(*"abababrsr")), [FusionPass(wide_sum)], verify=True)
    assert report.edits == 1  # the last eight Adds are one sum too long, those before it are not
    after, _ = run(program(of("a", "b", "r")), [FusionPass(wide_sum)], verify=True)
    assert [n.op_type for n in after] == ["WideSum"]


class Branches(nn.Module):
    """y = x + sum of three products of x, as attention's projections are. f32[N,64]."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))
        self.first = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).to(x.dtype)
        q, k, v = (part(h) for part in self.parts)
        y = h + torch.tanh(q) * torch.sigmoid(k) + torch.relu(v)
        return y.to(x.dtype).square().mean()


def gradients(model: nn.Module, x: torch.Tensor, **options: object) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = [p.detach().clone() for p in model.parameters()]
    trainer = onward.Trainer(model, optimizer, options={"mixed_precision": "bf16", **options})
    trainer.train_step(x)
    fused = any(x.op == "WideSum" for x in trainer.plan.launches)
    assert fused == ("disable" not in options)
    return [a - p.detach() for a, p in zip(before, model.parameters(), strict=True)]


def test_gradients_are_as_near_to_fp64_as_autocasts() -> None:
    """Beside eager PyTorch in bf16 and in fp64, on a model of three products of one value."""
    torch.manual_seed(0)
    model, x = Branches(), torch.randn(32, 64)
    exact = tiny.copy.deepcopy(model).double()
    exact(x.double()).backward()
    cast = tiny.copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = cast(x)
    loss.backward()
    found = gradients(tiny.copy.deepcopy(model), x)
    plain = gradients(tiny.copy.deepcopy(model), x, disable=("wide_sum",))
    for p, e, ours, without in zip(
        exact.parameters(), cast.parameters(), found, plain, strict=True
    ):
        assert p.grad is not None and e.grad is not None
        error, theirs = (ours - p.grad).norm(), (e.grad - p.grad).norm()
        assert float(error) <= 1.2 * float(theirs) + 1e-6 * float(p.grad.norm())
        torch.testing.assert_close(ours, without, rtol=1e-2, atol=1e-4)
