"""The walk: sums over uses, un-broadcasting, what stops a gradient, what is refused and how."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from op_cases import CASES, cases_of, stopped

from onward.differentiate import vjp
from onward.differentiate.rule_table import RULES
from onward.graph.build import Builder
from onward.graph.check import check
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role, Value
from onward.graph.types import DType, parse_type, product, symbol

ONE = np.array(1.0)
Write = Callable[[Builder, dict[str, Value]], Value]


def graph_of(types: dict[str, str], write: Write) -> Graph:
    graph = Graph("f")
    inputs = {name: graph.input(name, parse_type(t), Role.BATCH) for name, t in types.items()}
    graph.outputs = {"loss": write(Builder(graph, module="model"), inputs)}
    return graph


def total(b: Builder, y: Value) -> Value:
    return b.ReduceSum(y, keepdims=0)


def feeds_of(types: dict[str, str], sizes: dict[str, int]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    out: dict[str, np.ndarray] = {}
    for name, text in types.items():
        shape = tuple(int(n) for n in parse_type(text).specialized(sizes).shape)  # type: ignore[arg-type]
        out[name] = np.asarray(rng.uniform(0.5, 2.0, shape))
    return out


def autograd(
    function: Callable[..., torch.Tensor], feeds: dict[str, np.ndarray], wrt: list[str]
) -> dict[str, np.ndarray]:
    tensors = {n: torch.tensor(x, requires_grad=n in wrt) for n, x in feeds.items()}
    wants = torch.autograd.grad(function(**tensors), [tensors[n] for n in wrt])
    return {f"grad.{n}": g.numpy() for n, g in zip(wrt, wants, strict=True)}


B, T, D = symbol("B"), symbol("T"), symbol("D")


def _mixed(b: Builder, v: dict[str, Value]) -> Value:
    """Broadcasts, a reshape that merges two symbols, a mean over a symbolic dim, a slice."""
    y = b.Mul(b.Add(v["x"], v["row"]), v["column"])  # f64[B,T,D]
    rows = b.reshape(y, (product([B, T]), D))
    mean = b.ReduceMean(b.Mul(rows, rows), b.ints([0]), keepdims=0)  # f64[D]
    tail = b.slice(y, 1, 1, T)  # f64[B,T-1,D]
    joined = b.Concat(tail, y, axis=1)
    wide = b.expand(b.ReduceMax(joined, b.ints([1]), keepdims=1), (B, T, D))
    return b.Add(b.Add(total(b, b.Sin(wide)), total(b, mean)), total(b, b.Cos(joined)))


def _mixed_torch(x: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    y = (x + row) * column
    mean = (y * y).flatten(0, 1).mean(0)
    joined = torch.cat([y[:, 1:], y], 1)
    wide = joined.amax(1, keepdim=True).expand_as(y)
    return wide.sin().sum() + mean.sum() + joined.cos().sum()


SYMBOLIC = {"x": "f64[B,T,D]", "row": "f64[D]", "column": "f64[T,1]"}


@pytest.mark.parametrize("sizes", [{"B": 2, "T": 3, "D": 4}, {"B": 5, "T": 2, "D": 2}], ids=str)
@pytest.mark.parametrize(
    "types",
    [
        SYMBOLIC,
        SYMBOLIC | {"row": "f64[1,T,D]"},
        SYMBOLIC | {"column": "f64[1]"},
        SYMBOLIC | {"x": "f64[B,1,1]", "row": "f64[T,D]"},
        SYMBOLIC | {"x": "f64[]", "row": "f64[B,1,D]"},
    ],
    ids=lambda types: " ".join(types.values()),
)
def test_broadcasts_of_symbolic_dims_are_undone(
    types: dict[str, str], sizes: dict[str, int]
) -> None:
    step = vjp(graph_of(types, _mixed), ["loss"], list(types))
    check(step)
    feeds = feeds_of(types, sizes)
    have = evaluate(step, feeds | {"cotangent.loss": ONE})
    for name, want in autograd(_mixed_torch, feeds, list(types)).items():
        assert have[name].shape == want.shape
        np.testing.assert_allclose(have[name], want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("a", "c"),
    [
        ("f64[2,1]", "f64[1]"),
        ("f64[2,1,3]", "f64[1,1]"),
        ("f64[1,1]", "f64[]"),
        ("f64[1]", "f64[1,1]"),
    ],
)
def test_sizes_of_one_keep_their_place(a: str, c: str) -> None:
    types = {"a": a, "c": c}
    step = vjp(
        graph_of(types, lambda b, v: total(b, b.Sin(b.Mul(v["a"], v["c"])))), ["loss"], ["a", "c"]
    )
    feeds = feeds_of(types, {})
    have = evaluate(step, feeds | {"cotangent.loss": ONE})
    want = autograd(lambda a, c: (a * c).sin().sum(), feeds, ["a", "c"])
    for name in want:
        assert have[name].shape == want[name].shape
        np.testing.assert_allclose(have[name], want[name], rtol=1e-12)


def test_gradients_of_all_uses_are_added() -> None:
    types = {"x": "f64[3]", "w": "f64[3]"}

    def write(b: Builder, v: dict[str, Value]) -> Value:
        y = b.Mul(v["x"], v["w"])
        z = b.Add(b.Exp(y), b.Mul(y, v["x"]))
        return total(b, b.Add(b.Mul(z, z), v["x"]))

    def torch_write(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = x * w
        z = y.exp() + y * x
        return (z * z + x).sum()

    feeds = feeds_of(types, {})
    have = evaluate(
        vjp(graph_of(types, write), ["loss"], ["x", "w"]), feeds | {"cotangent.loss": ONE}
    )
    for name, want in autograd(torch_write, feeds, ["x", "w"]).items():
        np.testing.assert_allclose(have[name], want, rtol=1e-12)


def test_the_loss_weight_scales_every_gradient_and_not_the_loss() -> None:
    types = {"x": "f64[3]"}
    step = vjp(graph_of(types, lambda b, v: total(b, b.Exp(v["x"]))), ["loss"], ["x"])
    feeds = feeds_of(types, {})
    whole = evaluate(step, feeds | {"cotangent.loss": ONE})
    quarter = evaluate(step, feeds | {"cotangent.loss": ONE / 4})
    np.testing.assert_array_equal(quarter["loss"], whole["loss"])
    np.testing.assert_array_equal(quarter["grad.x"] * 4, whole["grad.x"])


def test_inputs_the_loss_does_not_reach_get_no_gradient() -> None:
    types = {"x": "f64[3]", "unused": "f64[3]"}
    graph = graph_of(types, lambda b, v: total(b, v["x"]))
    assert set(vjp(graph, ["loss"], ["x", "unused"]).outputs) == {"loss", "grad.x"}
    assert set(vjp(graph, ["loss"], ["unused"]).outputs) == {"loss"}


def test_only_what_is_asked_for_is_derived_and_the_graph_given_stays_as_it_was() -> None:
    types = {"x": "f64[3]", "w": "f64[3]"}
    graph = graph_of(types, lambda b, v: total(b, b.Mul(v["x"], v["w"])))
    before = len(graph)
    assert set(vjp(graph, ["loss"], ["w"]).outputs) == {"loss", "grad.w"}
    assert len(graph) == before
    assert set(graph.outputs) == {"loss"}


def test_a_marked_identity_stops_the_gradient() -> None:
    types = {"x": "f64[3]"}
    graph = graph_of(types, lambda b, v: total(b, b.Mul(stopped(b, b.Exp(v["x"])), b.Sin(v["x"]))))
    feeds = feeds_of(types, {})
    have = evaluate(vjp(graph, ["loss"], ["x"]), feeds | {"cotangent.loss": ONE})["grad.x"]
    np.testing.assert_allclose(have, np.exp(feeds["x"]) * np.cos(feeds["x"]), rtol=1e-12)


@pytest.mark.parametrize("behind", ["stop", "stop, before", "compare"])
def test_no_rule_is_asked_of_an_op_behind_what_stops_the_gradient(behind: str) -> None:
    """A Clip, which has no rule, whose result only decides, or that reads what is stopped."""
    assert "Clip" not in RULES

    def write(b: Builder, v: dict[str, Value]) -> Value:
        if behind == "stop, before":
            return total(b, b.Mul(v["x"], b.Clip(stopped(b, v["x"]))))
        p = b.Clip(v["x"])
        if behind == "stop":
            return total(b, b.Mul(v["x"], stopped(b, p)))
        return total(b, b.Where(b.Greater(p, 0.0), b.Sin(v["x"]), v["x"]))

    feeds = {"x": np.array([0.5, 1.5])}
    step = vjp(graph_of({"x": "f64[2]"}, write), ["loss"], ["x"])
    have = evaluate(step, feeds | {"cotangent.loss": ONE})["grad.x"]
    want = np.cos(feeds["x"]) if behind == "compare" else feeds["x"]
    np.testing.assert_allclose(have, want, rtol=1e-12)


def test_every_op_without_a_rule_is_named_with_its_modules() -> None:
    def write(b: Builder, v: dict[str, Value]) -> Value:
        y = Builder(b.graph, module="model.h.0.mlp").Clip(v["x"])
        y = Builder(b.graph, module="model.h.1.mlp").Clip(y)
        return total(b, y)

    with pytest.raises(ValueError) as refused:
        vjp(graph_of({"x": "f64[3]"}, write), ["loss"], ["x"])
    where = "model.h.0.mlp, model.h.1.mlp"
    assert str(refused.value).startswith(f"these ops have no gradient rule: Clip at {where}; fix: ")


@pytest.mark.parametrize(
    ("label", "reason"),
    [
        ("Max-10", "Max with 1 inputs"), ("Max-11", "Max with 3 inputs"),
        ("Min-10", "Min with 3 inputs"), ("GatherND-4", "batch_dims"),
    ],
)  # fmt: skip
def test_calls_that_a_rule_does_not_cover_are_refused_with_their_module(
    label: str, reason: str
) -> None:
    case = next(case for case in CASES if case.label == label)
    graph = case.graph(DType.DOUBLE)
    graph.outputs = {"loss": total(Builder(graph), graph.outputs["y0"])}
    with pytest.raises(ValueError, match=f"{case.op} at model.layer cannot .*{reason}"):
        vjp(graph, ["loss"], ["x0"])


# ---- at ties and edges, where differences say nothing: as PyTorch


EDGES: dict[str, tuple[Write, Callable[..., torch.Tensor]]] = {
    "Max": (lambda b, v: b.Max(v["a"], v["c"]), torch.maximum),
    "Min": (lambda b, v: b.Min(v["a"], v["c"]), torch.minimum),
    "Relu": (lambda b, v: b.Mul(b.Relu(v["a"]), v["c"]), lambda a, c: a.relu() * c),
    "Abs": (lambda b, v: b.Mul(b.Abs(v["a"]), v["c"]), lambda a, c: a.abs() * c),
    "Pow of 0": (lambda b, v: b.Add(b.Pow(v["a"], 0), v["c"]), lambda a, c: a**0 + c),
    "Pow of 2": (lambda b, v: b.Add(b.Pow(v["a"], 2), v["c"]), lambda a, c: a**2 + c),
    "Pow": (
        lambda b, v: b.Pow(b.Abs(v["a"]), b.Abs(v["c"])), lambda a, c: a.abs() ** c.abs(),
    ),
    "ReduceMax": (
        lambda b, v: b.Add(b.ReduceMax(v["a"], b.ints([0])), v["c"]),
        lambda a, c: a.amax(0, keepdim=True) + c,
    ),
    "ReduceMin": (
        lambda b, v: b.Add(b.ReduceMin(v["a"], b.ints([0])), v["c"]),
        lambda a, c: a.amin(0, keepdim=True) + c,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_ties_and_edges_go_as_in_torch(name: str) -> None:
    write, function = EDGES[name]
    feeds = {"a": np.array([0.0, 1.0, 1.0, -1.0, 0.0]), "c": np.array([0.0, 1.0, 0.5, 2.0, 3.0])}
    types = {"a": "f64[5]", "c": "f64[5]"}
    step = vjp(graph_of(types, lambda b, v: total(b, write(b, v))), ["loss"], ["a", "c"])
    have = evaluate(step, feeds | {"cotangent.loss": ONE})
    want = autograd(lambda a, c: function(a, c).sum(), feeds, ["a", "c"])
    for key in want:
        np.testing.assert_array_equal(have.get(key, np.zeros(5)), want[key])


def test_a_loss_in_which_no_label_counts_has_gradient_zero() -> None:
    case = cases_of("SoftmaxCrossEntropyLoss")[0]
    graph = case.graph(DType.DOUBLE)
    graph.outputs = {"loss": graph.outputs["y0"]}
    step = vjp(graph, ["loss"], ["x0"])
    feeds = case.feeds(DType.DOUBLE) | {"x1": np.full(4, -100)}
    got = evaluate(step, feeds | {"cotangent.loss": ONE})["grad.x0"]
    np.testing.assert_array_equal(got, np.zeros((4, 5)))
