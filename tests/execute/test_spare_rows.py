"""Rows that a buffer has to spare at smaller sizes than planned: products in bf16 make use of them,
whatever lies there, and touch no others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from onward.execute import Executable, Memory
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.types import DType, parse_type
from onward.kernels import host
from onward.kernels.aten import row_counts
from onward.plan import MemoryRegion, make_plan
from onward.rewrite import specialize

MOST = 200
TARGET = replace(host(), multiplies_bf16=True)  # else blocks are widened, which spare no rows
Made = dict[str, Value]


def chain(b: Builder, x: Value, w: Value) -> Made:
    """A product, a residual sum into it, and a product over the rows."""
    h = b.Tanh(b.Cast(x, to=DType.BFLOAT16))
    y = b.Gemm(h, w, h)
    return {"y": b.Cast(y, to=DType.FLOAT), "dw": b.Cast(b.Gemm(h, y, transA=1), to=DType.FLOAT)}


def parts(b: Builder, x: Value, w: Value) -> Made:
    """Two products, one reading the other's result, each concatenated into a larger value."""
    h = b.Tanh(b.Cast(x, to=DType.BFLOAT16))
    y = b.Gemm(h, w)
    below = b.Concat(y, b.Neg(h), b.Gemm(y, w), axis=0)
    beside = b.Concat(b.Gemm(h, w), h, axis=1)
    return {
        "below": b.Cast(below, to=DType.FLOAT),
        "beside": b.Cast(beside, to=DType.FLOAT),
        "dw": b.Cast(b.Gemm(beside, h, transA=1), to=DType.FLOAT),
    }


def halves(b: Builder, x: Value, w: Value) -> Made:
    """Products whose operands are the upper or lower rows, or some columns, of other values."""
    h = b.Tanh(b.Cast(x, to=DType.BFLOAT16))
    rows = type_of(h).shape[0]
    upper, lower = b.Split(b.Concat(h, b.Neg(h), axis=0), b.sizes((rows, rows)), axis=0)
    left, right = b.Split(b.Concat(h, b.Mul(h, h), axis=1), b.ints([16, 16]), axis=1)
    made = {
        "upper": b.Gemm(upper, b.Gemm(upper, w), transA=1),
        "lower": b.Gemm(lower, b.Gemm(lower, w), transA=1),
        "right": b.Gemm(right, b.Gemm(left, w), transA=1),
        "left": b.Gemm(left, left, transA=1),
        "both": b.Add(b.Add(upper, lower), b.Add(left, right)),
    }
    return {name: b.Cast(y, to=DType.FLOAT) for name, y in made.items()}


def turned(b: Builder, x: Value, w: Value) -> Made:
    """A transposed product, whose rows are no longer the outermost dim."""
    h = b.Tanh(b.Cast(x, to=DType.BFLOAT16))
    t = b.Transpose(b.Gemm(h, w), perm=[1, 0])
    return {"dw": b.Cast(b.MatMul(t, h), to=DType.FLOAT), "t": b.Cast(t, to=DType.FLOAT)}


@pytest.mark.parametrize("multiplies", [True, False], ids=["products", "widened products"])
@pytest.mark.parametrize("n", [2, 31, 40, 97, 129, 199, MOST])
@pytest.mark.parametrize("make", [chain, parts, halves, turned])
def test_results_are_those_of_a_plan_for_these_rows(
    make: Callable[[Builder, Value, Value], Made], n: int, multiplies: bool
) -> None:
    def run(most: int) -> dict[str, torch.Tensor]:
        graph = Graph()
        b = Builder(graph)
        x = graph.input("x", parse_type("f32[R,16]"), Role.BATCH)
        w = graph.input("w", parse_type("bf16[16,16]"), Role.PARAM)
        graph.outputs = make(b, x, w)
        bound = specialize(graph, {"R": most}, ["R"], list(graph.outputs))
        memory = Memory(torch.device("cpu"))
        weights = torch.randn(16, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
        plan = make_plan(bound, {"R": most}, target=replace(host(), multiplies_bf16=multiplies))
        executable = Executable(plan, memory, {"w": weights})
        executable.bind()
        for region in (MemoryRegion.SCRATCH, MemoryRegion.RESIDUAL):
            size = memory.arena_bytes(region)
            if size:
                memory.window(region, 0, size).fill_(0xFF)  # a NaN in every type
        data = torch.randn(n, 16, generator=torch.Generator().manual_seed(2))
        executable.run({"x": data}, {"R": n})
        return {name: executable.output(name) for name in graph.outputs}

    for name, found in run(MOST).items():
        want = run(n)[name]
        assert found.shape == want.shape
        torch.testing.assert_close(found, want, rtol=0.01, atol=0.01 * float(want.abs().max()))


def test_products_have_few_row_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eighty batches with different row counts share a few sizes of matrix products, which is the
    purpose of spare rows."""
    counts: set[int] = set()
    plain = row_counts._multiply

    def counted(*operands: torch.Tensor, out: torch.Tensor) -> Callable[[], object]:
        counts.update({operands[-2].shape[0], operands[-2].shape[1]})
        return plain(*operands, out=out)

    monkeypatch.setattr(row_counts, "_multiply", counted)
    graph = Graph()
    b = Builder(graph)
    x = graph.input("x", parse_type("f32[R,16]"), Role.BATCH)
    w = graph.input("w", parse_type("bf16[16,16]"), Role.PARAM)
    graph.outputs = chain(b, x, w)
    opened = specialize(graph, {"R": MOST}, ["R"], list(graph.outputs))
    plan = make_plan(opened, {"R": MOST}, target=TARGET)
    executable = Executable(
        plan, Memory(torch.device("cpu")), {"w": torch.zeros(16, 16, dtype=torch.bfloat16)}
    )
    for n in range(100, 180):
        executable.run({"x": torch.zeros(n, 16)}, {"R": n})
    assert counts - {16} == {row_counts.rounded(n) for n in range(100, 180)}
