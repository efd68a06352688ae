"""The pass that joins a residual sum, its dropout and its norm: what it takes and leaves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from fusing import fused as fuse
from fusing import reasons
from op_cases import stopped
from torch import nn

from onward.graph.build import Builder
from onward.graph.check import check
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Node, Role, Value, attributes
from onward.graph.types import parse_type
from onward.rewrite import FORWARD, run
from onward.rewrite.add_layer_norm import add_layer_norm

pytestmark = pytest.mark.usefixtures("captures_kept")

TYPES = {
    "x": "f32[B,3,5]", "residual": "f32[B,3,5]", "row": "f32[1,3,5]", "scale": "f32[5]",
    "bias": "f32[5]", "plane": "f32[3,5]", "seed": "i64[2]", "sample_offset": "i64[]",
}  # fmt: skip


class Made:
    """A graph with the inputs above, and the pieces of the pattern."""

    def __init__(self) -> None:
        self.graph = Graph("f")
        self.b = Builder(self.graph, module="model")
        self.v = {n: self.graph.input(n, parse_type(t), Role.BATCH) for n, t in TYPES.items()}

    def __getattr__(self, name: str) -> Value:
        return self.v[name]

    def dropped(self, x: Value, site: int = 3, ratio: float = 0.4) -> Value:
        return self.b.Dropout(x, self.seed, self.sample_offset, ratio=ratio, site=site,
                              sample_dim=0)  # fmt: skip

    def norm(self, r: Value, axis: int = -1, epsilon: float = 2.0**-8) -> tuple[Value, ...]:
        return self.b.LayerNormalization(r, self.scale, self.bias, axis=axis, epsilon=epsilon)

    def out(self, *values: Value) -> Graph:
        self.graph.outputs = {f"o{i}": v for i, v in enumerate(values)}
        return self.graph


def ops(graph: Graph) -> list[str]:
    return [node.op_type for node in graph]


def fused(graph: Graph) -> list[Node]:
    return [n for n in graph if n.op_type == "AddLayerNormalization"]


def feeds() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    out: dict[str, Any] = {
        name: rng.standard_normal([2 if n == "B" else int(n) for n in text[4:-1].split(",")])
        for name, text in TYPES.items()
        if text.startswith("f32")
    }
    out = {name: array.astype(np.float32) for name, array in out.items()}
    return out | {"seed": np.array([123, 456]), "sample_offset": np.array(5)}


Sum = Callable[[Made], tuple[Value, ...]]


def sum_and_norm(m: Made, first: Value, second: Value) -> tuple[Value, ...]:
    r: Value = m.b.Add(first, second)
    return (*m.norm(r), r)


TAKEN: dict[str, tuple[Sum, list[str]]] = {
    "plain": (lambda m: sum_and_norm(m, m.x, m.residual)[:1], []),
    "the sum lives on": (lambda m: sum_and_norm(m, m.x, m.residual), []),
    "dropout first": (lambda m: sum_and_norm(m, m.dropped(m.x), m.residual), []),
    "dropout second": (lambda m: sum_and_norm(m, m.residual, m.dropped(m.x)), []),
    "dropout of both": (
        lambda m: sum_and_norm(m, m.dropped(m.x), m.dropped(m.residual, site=4)), ["Dropout"],
    ),
    "x added to itself": (lambda m: sum_and_norm(m, m.x, m.x), []),
    "x added to its dropout": (lambda m: sum_and_norm(m, m.x, m.dropped(m.x)), []),
    "the last dim by its number": (lambda m: m.norm(m.b.Add(m.x, m.residual), axis=2), []),
    "everything dropped": (
        lambda m: sum_and_norm(m, m.dropped(m.x, ratio=1.0), m.residual), ["Dropout"],
    ),
}  # fmt: skip


def read_by_another(m: Made) -> tuple[Value, ...]:
    dropped = m.dropped(m.x)
    return (*sum_and_norm(m, dropped, m.residual), m.b.Neg(dropped))


def shown_itself(m: Made) -> tuple[Value, ...]:
    dropped = m.dropped(m.x)
    return (*sum_and_norm(m, dropped, m.residual), dropped)


def read_before_the_norm(m: Made) -> tuple[Value, ...]:
    r = m.b.Add(m.dropped(m.x), m.residual)
    return (m.b.Neg(r), *m.norm(r))


def two_norms(m: Made) -> tuple[Value, ...]:
    r = m.b.Add(m.x, m.residual)
    return (*m.norm(r), *m.norm(r, epsilon=0.5))


def without_bias(m: Made) -> tuple[Value, ...]:
    return m.b.LayerNormalization(m.b.Add(m.x, m.residual), m.scale, axis=-1)


TAKEN |= {
    "dropout read by another": (read_by_another, ["Dropout", "Neg"]),
    "dropout shown": (shown_itself, ["Dropout"]),
    "the sum is read before the norm": (read_before_the_norm, ["Neg"]),
    "two norms of one sum": (two_norms, ["LayerNormalization"]),
    "without bias": (without_bias, []),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_sum_and_its_norm_become_one_and_keep_every_bit(name: str) -> None:
    write, left = TAKEN[name]
    m = Made()
    graph = m.out(*write(m))
    want = evaluate(graph, feeds())
    assert fuse(add_layer_norm, graph) == 1
    check(graph)
    assert sorted(ops(graph)) == sorted(["AddLayerNormalization", *left])
    for key, y in evaluate(graph, feeds()).items():
        np.testing.assert_array_equal(y, want[key])
    assert fuse(add_layer_norm, graph) == 0


def computed_scale(m: Made) -> tuple[Value, ...]:
    r = m.b.Add(m.x, m.residual)
    return m.b.LayerNormalization(r, m.b.Exp(m.scale), m.bias, axis=-1)


# what is left, and why where it is a near miss
LEFT: dict[str, tuple[Sum, str | None]] = {
    "a broadcast term": (lambda m: m.norm(m.b.Add(m.x, m.row)), None),
    "a bias": (lambda m: m.norm(m.b.Add(m.x, m.bias)), None),
    "a difference": (lambda m: m.norm(m.b.Sub(m.x, m.residual)), None),
    "dropout after the sum": (lambda m: m.norm(m.dropped(m.b.Add(m.x, m.residual))), None),
    "no sum": (lambda m: m.norm(m.x), None),
    "norm over two dims": (
        lambda m: m.b.LayerNormalization(m.b.Add(m.x, m.residual), m.plane, axis=1),
        "it normalises more than the last dim",
    ),
    "scale computed after the sum": (computed_scale, "its weights are computed"),
    "a sum that stops gradients": (
        lambda m: m.norm(stopped(m.b, m.b.Add(m.x, m.residual))), None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT)
def test_what_only_looks_like_it_is_left(name: str) -> None:
    write, reason = LEFT[name]
    m = Made()
    graph = m.out(*write(m))
    before = ops(graph)
    assert reasons(add_layer_norm, graph) == ([] if reason is None else [reason])
    assert ops(graph) == before


@pytest.mark.parametrize(("at", "edits"), [("sum", 0), ("dropped", 1)])
def test_what_stops_gradients_is_in_no_fusion(at: str, edits: int) -> None:
    m = Made()
    dropped = m.dropped(m.x)
    total = m.b.Add(stopped(m.b, dropped) if at == "dropped" else dropped, m.residual)
    graph = m.out(*m.norm(stopped(m.b, total) if at == "sum" else total))
    assert fuse(add_layer_norm, graph) == edits
    assert {"StopGradient", "Dropout"} <= set(ops(graph))


def test_the_term_that_lives_on_is_the_residual() -> None:
    m = Made()
    on = m.b.Exp(m.x)
    graph = m.out(*m.norm(m.b.Add(on, m.residual)), m.b.Neg(on))
    assert fuse(add_layer_norm, graph) == 1
    (node,) = fused(graph)
    assert list(node.inputs[:2]) == [m.residual, on]


# ---- whole models


class Encoder(nn.Module):
    """One layer of PyTorch's own encoder, with a loss."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(
            16, 2, 24, dropout=0.2, batch_first=True, norm_first=norm_first
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.layer(x).square().mean()}


def encoder(norm_first: bool) -> tuple[nn.Module, tiny.Tensors]:
    torch.manual_seed(0)
    return Encoder(norm_first).train(), {"x": torch.randn(3, 5, 16)}


# (norms left alone, sums joined with dropout): the first norm of GPT-2 follows a dropout, BERT's
# first a sum that is broadcast and its last a Gelu; a pre-norm layer begins with a norm
MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, tiny.Tensors]], int, int]] = {
    "gpt2": (lambda: (tiny.gpt2(), tiny.batch(3, 10, "right")), 1, 4),
    "bert": (lambda: (tiny.bert(), tiny.batch(3, 10, "right")), 2, 4),
    "post-norm encoder": (lambda: encoder(norm_first=False), 0, 2),
    "pre-norm encoder": (lambda: encoder(norm_first=True), 1, 1),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_pattern_at_every_residual_sum(name: str) -> None:
    make, alone, joined = MODELS[name]
    model, data = make()
    made = tiny.compiled(model, data)
    count = Counter(ops(made.forward))
    assert (count["LayerNormalization"], count["AddLayerNormalization"]) == (alone, joined)
    assert all(attributes(n)["ratio"] > 0 for n in fused(made.forward))
    step = made.differentiated(tiny.trained(made))
    assert Counter(ops(step))["AddLayerNormalizationGrad"] == joined
    # the step computes what it computes without the pass
    plain = tiny.compiled(model, data, disable=["add_layer_norm"])
    names = ["loss", *(f"grad.{n}" for n in tiny.trained(made))]
    want = tiny.execute(plain, plain.differentiated(tiny.trained(plain)), data, names)
    have = tiny.execute(made, step, data, names)
    assert torch.equal(have["loss"], want["loss"])
    for key in names:
        torch.testing.assert_close(have[key], want[key], rtol=1e-4, atol=1e-6, msg=key)


def test_the_pass_is_switched_off_by_its_name() -> None:
    m = Made()
    graph = m.out(*sum_and_norm(m, m.dropped(m.x), m.residual))
    off, reports = run(graph, FORWARD, disable=["add_layer_norm"])
    assert "add_layer_norm" not in [r.name for r in reports]
    assert not fused(off)
    on, reports = run(graph, FORWARD)
    assert {r.name: r.edits for r in reports}["add_layer_norm"] == 1
    assert len(fused(on)) == 1
