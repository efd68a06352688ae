"""Attention with an addend of f32 in mixed precision: where it multiplies low numbers, and what it
computes then."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from ml_dtypes import bfloat16

from onward.graph.build import Builder
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.types import DType, parse_type
from onward.kernels import Target
from onward.plan.fusible import Fusible
from onward.rewrite import FusionPass, run
from onward.rewrite.precision import low_attention

CUDA = Target("cuda", triton=True, multiplies_bf16=True, capability=(9, 0))
PASS = FusionPass(low_attention)
TYPES = {
    **dict.fromkeys("qkv", "bf16[2,3,5,16]"), "wide": "f32[2,3,5,16]", "half": "f16[2,3,5,16]",
    "bias": "f32[1,3,5,5]", "added": "f32[2,1,5,5]", "mask": "b[2,1,1,5]",
}  # fmt: skip
Values = dict[str, Value]
Write = Callable[[Builder, Values], list[Value]]


def attention(
    b: Builder, v: Values, mask: str = "", bias: str = "bias", q: str = "q", trained: int = 1
) -> Value:
    q_, k, w = (b.cast(v[n], DType.FLOAT) for n in (q, "k", "v"))
    given = [q_, k, w, v.get(mask), *[None] * 4, v.get(bias)]
    attrs = {"scale": 0.25, "is_causal": 0, **({"bias_gradient": trained} if bias else {})}
    made = b.node("FlashAttention", given, attrs)
    assert isinstance(made, tuple)
    return made[0]


def low(b: Builder, y: Value) -> Value:
    return b.Cast(y, to=DType.BFLOAT16)


# name -> what is written, and how many calls become low
PLACES: dict[str, tuple[Write, int]] = {
    "a bias": (lambda b, v: [low(b, attention(b, v))], 1),
    "a bias that is not trained": (lambda b, v: [low(b, attention(b, v, trained=0))], 1),
    "a bias and a mask": (lambda b, v: [low(b, attention(b, v, "mask"))], 1),
    "a mask of numbers": (lambda b, v: [low(b, attention(b, v, "added", ""))], 1),
    "nothing": (lambda b, v: [low(b, attention(b, v, "", ""))], 1),
    "two calls": (lambda b, v: [low(b, attention(b, v)), low(b, attention(b, v, "mask"))], 2),
    "a result of f32": (lambda b, v: [attention(b, v)], 0),
    "a reader of f32": (lambda b, v: [low(b, y := attention(b, v)), b.Exp(y)], 0),
    "queries of f32": (lambda b, v: [low(b, attention(b, v, q="wide"))], 0),
    "two low types": (lambda b, v: [low(b, attention(b, v, q="half"))], 0),
    "another low type after it": (
        lambda b, v: [b.Cast(attention(b, v), to=DType.FLOAT16)], 0,
    ),
}  # fmt: skip


def program(write: Write) -> Graph:
    graph = Graph("f")
    v = {n: graph.input(n, parse_type(t), Role.BATCH) for n, t in TYPES.items()}
    b = Builder(graph, module="decoder.attention")
    graph.outputs = {f"y{i}": y for i, y in enumerate(write(b, v))}
    return graph


def feeds() -> dict[str, np.ndarray]:
    rng, made = np.random.default_rng(7), {}
    numpy = {"bf16": bfloat16, "f16": np.float16, "f32": np.float32}
    for name, text in TYPES.items():
        kind, _, sizes = text.partition("[")
        drawn = rng.standard_normal([int(n) for n in sizes.rstrip("]").split(",")])
        made[name] = drawn > -0.5 if kind == "b" else drawn.astype(numpy[kind])
    made["bias"][..., ::2] = np.finfo(np.float32).min  # infinite in bf16
    return made


def calls(graph: Graph) -> list[tuple[bool, bool]]:
    """Whether products and result of each attention are low."""
    nodes = [n for n in graph if n.op_type == "FlashAttention"]
    return [(type_of(n.inputs[0]).is_low, type_of(n.outputs[0]).is_low) for n in nodes]


@pytest.mark.parametrize("name", PLACES)
def test_low_operands_and_results_make_it_low(name: str) -> None:
    write, count = PLACES[name]
    before = program(write)
    after, [report] = run(program(write), [PASS], refuse=Fusible(CUDA), verify=True)
    assert report.edits == count and not report.misses
    assert calls(after).count((True, True)) == count
    assert len(set(calls(after))) == 1
    for key, want in evaluate(before, feeds()).items():
        have = evaluate(after, feeds())[key]
        assert have.dtype == want.dtype
        np.testing.assert_array_equal(have.astype(np.float32), want.astype(np.float32))


@pytest.mark.parametrize("target", [Target(instructions="plain"), Target("cuda")], ids=str)
def test_it_stays_f32_where_no_kernel_reads_both(target: Target) -> None:
    after, [report] = run(program(PLACES["a bias"][0]), [PASS], refuse=Fusible(target), verify=True)
    assert report.edits == 0 and calls(after) == [(False, False)]
    [miss] = report.misses
    assert (miss.op, miss.module) == ("FlashAttention", "decoder.attention")
