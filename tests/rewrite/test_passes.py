"""Rewrite passes on hand-made graphs: what each edits, what it must leave, and its name."""

from __future__ import annotations

import numpy as np
import pytest
from fusing import fused, reasons

from onward.graph.build import Builder
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Node, Role, Value, array_of, attributes, type_of
from onward.graph.types import DType, parse_type, product, symbol
from onward.kernels import Target
from onward.plan import Fusible
from onward.rewrite import FORWARD, STEP, Pass, prune, run
from onward.rewrite.common_subexpression_elimination import common_subexpression_elimination
from onward.rewrite.constant_folding import LIMIT, constant_folding
from onward.rewrite.dead_code_elimination import dead_code_elimination
from onward.rewrite.flash_attention import flash_attention
from onward.rewrite.noop import noop
from onward.rewrite.scatter_into import scatter_into


class Made:
    """A graph with inputs `x`, `y` of one type, its builder, and `out` to name results."""

    def __init__(self, text: str = "f32[2,3]") -> None:
        self.graph = Graph("f")
        self.x = self.graph.input("x", parse_type(text), Role.BATCH)
        self.y = self.graph.input("y", parse_type(text), Role.BATCH)
        self.seed = self.graph.input("seed", parse_type("i64[2]"), Role.RANDOM)
        self.b = Builder(self.graph, module="model")

    def out(self, *values: Value) -> Graph:
        self.graph.outputs = {f"o{i}": v for i, v in enumerate(values)}
        return self.graph


def ops(graph: Graph) -> list[str]:
    return [node.op_type for node in graph]


def producer(value: Value) -> Node:
    node = value.producer()
    assert node is not None
    return node


def stopped(b: Builder, x: Value) -> Value:
    y: Value = b.StopGradient(x)
    return y


# ---- fold


def test_fold_evaluates_what_only_constants_enter() -> None:
    m = Made()
    b = m.b
    table = b.const(np.arange(6, dtype=np.float32).reshape(2, 3))
    wide = b.Mul(b.Add(table, 1.0), table)
    left, right = b.Split(b.transpose(table, [1, 0]), b.ints([1, 2]), axis=0)
    graph = m.out(b.Add(m.x, wide), left, right)
    assert constant_folding(graph) == 4
    assert ops(graph) == ["Add"]
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    (folded,) = [v for v in producer(graph.outputs["o0"]).inputs if v is not m.x]
    np.testing.assert_array_equal(array_of(folded), (array + 1) * array)
    np.testing.assert_array_equal(array_of(graph.outputs["o1"]), array.T[:1])
    np.testing.assert_array_equal(array_of(graph.outputs["o2"]), array.T[1:])


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_fold_picks_elements_of_long_tensors(axis: int) -> None:
    m = Made()
    data = np.arange(100 * 70, dtype=np.float32).reshape(100, 70)
    at = np.array([[3, -1, 69], [0, 64, 68]])
    picked = m.b.GatherElements(m.b.const(data), m.b.const(at), axis=axis)
    graph = m.out(picked)
    assert constant_folding(graph) == 1
    rows, columns = np.indices(at.shape)
    want = data[at, columns] if axis == 0 else data[rows, at]
    np.testing.assert_array_equal(array_of(graph.outputs["o0"]), want)


def test_fold_writes_known_sizes_as_numbers_and_leaves_unknown_ones() -> None:
    m = Made("f32[B,3]")
    sizes, first = m.b.Shape(m.x), m.b.Shape(m.x, start=1)
    graph = m.out(sizes, first, m.b.Mul(first, m.b.ints([2])))
    assert constant_folding(graph) == 2
    assert ops(graph) == ["Shape"]
    assert [array_of(graph.outputs[o]) for o in ("o1", "o2")] == [[3], [6]]
    bound = graph.clone({"B": 5})
    assert constant_folding(bound) == 1
    np.testing.assert_array_equal(array_of(bound.outputs["o0"]), [5, 3])


def test_fold_keeps_element_types() -> None:
    for dtype in (DType.FLOAT, DType.DOUBLE, DType.FLOAT16, DType.INT64):
        m = Made()
        b = m.b
        c = b.const(np.array([[1, 4]], dtype=dtype.numpy()))
        results = [b.reduce_sum(c, [0, 1], keepdims=False), b.Neg(c), b.expand(c, (3, 2))]
        if dtype != DType.INT64:
            results += [b.Sqrt(c), b.Pow(c, 2.0), b.ReduceMean(c, keepdims=0)]
        graph = m.out(*results)
        assert constant_folding(graph) == len(results)
        for value in graph.outputs.values():
            array = array_of(value)
            assert array is not None and array.dtype == dtype.numpy()


def test_fold_leaves_large_and_random_results_to_run() -> None:
    m = Made()
    one = m.b.scalar(1.0, DType.FLOAT)
    small, large = m.b.expand(one, (LIMIT,)), m.b.expand(one, (LIMIT + 1,))
    drop = m.b.Dropout(small, m.b.ints([1, 2]), None, ratio=0.5, site=0, sample_dim=-1)
    graph = m.out(small, large, drop)
    assert constant_folding(graph) == 1
    assert ops(graph) == ["Expand", "Dropout"]


# ---- noop


def neutral(b: Builder, x: Value) -> list[Value]:
    """Values that are `x` said otherwise."""
    one = b.const(np.ones((1, 1), np.float32))
    return [
        b.Identity(x), b.Add(x, 0.0), b.Add(0.0, x), b.Sub(x, 0.0), b.Mul(x, 1.0), b.Mul(1.0, x),
        b.Div(x, 1.0), b.Mul(x, one), b.Cast(x, to=DType.FLOAT), b.Transpose(x, perm=[0, 1]),
        b.Expand(x, b.ints([1, 3])), b.Reshape(x, b.ints([0, -1])), b.Concat(x, axis=0),
        b.slice(x, 0, 0, 2), b.slice(x, 1, 0, 2**31),
    ]  # fmt: skip


def changing(b: Builder, x: Value, y: Value) -> list[Value]:
    """Values that are almost `x`."""
    return [
        b.Sub(0.0, x), b.Div(1.0, x), b.Add(x, 1.0), b.Mul(x, 0.0), b.Add(x, y), b.Pow(x, 1.0),
        b.Cast(x, to=DType.DOUBLE), b.Transpose(x, perm=[1, 0]), b.Transpose(x),
        b.Reshape(x, b.ints([3, 2])), b.slice(x, 0, 0, 1), b.Concat(x, y, axis=0),
        b.Add(x, b.const(np.zeros((4, 1, 1), np.float32))),
        b.Mul(x, b.const(np.ones((2, 3), np.float32))),
    ]  # fmt: skip


def test_noop_removes_what_hands_its_input_on() -> None:
    m = Made()
    values = neutral(m.b, m.x)
    graph = m.out(*values)
    assert noop(graph) == len(values)
    assert ops(graph) == []
    assert set(graph.outputs.values()) == {m.x}


def test_noop_leaves_what_changes_something() -> None:
    m = Made()
    graph = m.out(*changing(m.b, m.x, m.y))
    before = ops(graph)
    assert noop(graph) == 0
    assert ops(graph) == before


def test_noop_keeps_the_identity_that_stops_a_gradient() -> None:
    m = Made()
    graph = m.out(stopped(m.b, m.x))
    assert noop(graph) == 0
    assert ops(graph) == ["StopGradient"]


def test_noop_joins_reshapes_and_transposes() -> None:
    m = Made("f32[B,T,6]")
    b, B, T = m.b, symbol("B"), symbol("T")
    flat = b.reshape(m.x, (product([B, T]), 6))
    heads = b.reshape(flat, (B, T, 2, 3))
    turned = b.transpose(heads, [0, 2, 1, 3])
    again = b.transpose(turned, [3, 0, 1, 2])
    back = b.transpose(b.transpose(m.x, [1, 2, 0]), [2, 0, 1])
    graph = m.out(again, back, b.reshape(b.unsqueeze(m.x, [0]), (B, T, 6)))
    feeds = {"x": np.arange(36, dtype=np.float32).reshape(2, 3, 6), "seed": np.zeros(2, np.int64)}
    feeds["y"] = feeds["x"]
    want = evaluate(graph, feeds)
    assert noop(graph) == 4
    dead_code_elimination(graph)
    assert ops(graph) == ["Reshape", "Transpose"]
    assert graph.outputs["o1"] is m.x
    assert graph.outputs["o2"] is m.x
    for name, y in evaluate(graph, feeds).items():
        np.testing.assert_array_equal(y, want[name])


def test_noop_makes_a_product_by_group_as_it_is_wanted() -> None:
    m = Made("f32[6,3]")
    ends = m.b.ints([2, 5])
    outer = [m.b.GroupedOuter(x, m.y, ends) for x in (m.x, m.b.Neg(m.x), m.b.Abs(m.x))]
    turned, other = m.b.transpose(outer[0], [0, 2, 1]), m.b.transpose(outer[1], [1, 0, 2])
    graph = m.out(turned, other, outer[2], m.b.transpose(outer[2], [0, 2, 1]))
    random = np.random.default_rng(0)
    numbers = {name: random.normal(size=(6, 3)).astype(np.float32) for name in ("x", "y")}
    feeds = {**numbers, "seed": np.zeros(2, np.int64)}
    want = evaluate(graph, feeds)
    assert noop(graph) == 1  # others turn otherwise, or the product is read itself
    for name, y in evaluate(graph, feeds).items():
        np.testing.assert_allclose(y, want[name], rtol=1e-6)


def test_noop_joins_transposes_that_leave_their_order_to_the_standard() -> None:
    m = Made("f32[2,3,4]")
    graph = m.out(m.b.Transpose(m.b.Transpose(m.x)), m.b.Transpose(m.b.transpose(m.x, [1, 2, 0])))
    feeds = {"x": np.arange(24, dtype=np.float32).reshape(2, 3, 4), "seed": np.zeros(2, np.int64)}
    feeds["y"] = feeds["x"]
    want = evaluate(graph, feeds)
    assert noop(graph) == 2
    dead_code_elimination(graph)
    assert ops(graph) == ["Transpose"]
    for name, y in evaluate(graph, feeds).items():
        np.testing.assert_array_equal(y, want[name])


def test_noop_does_not_move_the_forward_into_the_backward() -> None:
    """A backward transpose that undoes a forward one leaves the forward value what it was."""
    m = Made()
    source = m.b.Exp(m.x)
    forward = m.b.transpose(source, [1, 0])
    backward = m.b.transpose(forward, [1, 0])
    turned = m.b.transpose(m.b.reshape(forward, (2, 3)), [1, 0])
    joined = m.b.reshape(m.b.reshape(source, (6,)), (3, 2))
    for value in (backward, turned, joined):
        producer(value).meta["backward"] = True
    graph = m.out(forward, m.b.Neg(backward), turned, joined)
    assert noop(graph) == 2
    assert not producer(source).meta.get("backward")
    assert producer(graph.outputs["o3"]).meta.get("backward")


# ---- cse


def test_cse_merges_equal_nodes_and_what_becomes_equal() -> None:
    m = Made()
    b = m.b
    first, second = b.Add(m.x, m.y), b.Add(m.x, m.y)
    graph = m.out(b.Exp(first), b.Exp(second), b.Sub(first, second))
    assert common_subexpression_elimination(graph) == 2
    assert ops(graph) == ["Add", "Exp", "Sub"]
    assert graph.outputs["o0"] is graph.outputs["o1"]


def test_cse_tells_apart_inputs_attributes_and_ops() -> None:
    m = Made("f32[3,3]")
    b = m.b
    graph = m.out(
        b.Sub(m.x, m.y), b.Sub(m.y, m.x), b.Add(m.x, m.y), b.Softmax(m.x, axis=0),
        b.Softmax(m.x, axis=1), b.Gelu(m.x, approximate="none"), b.Gelu(m.x, approximate="tanh"),
        b.Add(m.x, 1.0), b.Add(m.x, 2.0), b.Split(m.x, b.ints([1, 2]), axis=0)[0],
        b.Split(m.x, b.ints([2, 1]), axis=0)[0],
    )  # fmt: skip
    assert common_subexpression_elimination(graph) == 0


def test_cse_merges_all_outputs_of_a_node() -> None:
    m = Made()
    parts = [m.b.Split(m.x, m.b.ints([1, 2]), axis=1) for _ in range(2)]
    graph = m.out(*parts[0], *parts[1])
    assert common_subexpression_elimination(graph) == 1
    assert graph.outputs["o0"] is graph.outputs["o2"]
    assert graph.outputs["o1"] is graph.outputs["o3"]


def test_cse_merges_draws_of_one_site_and_never_of_two() -> None:
    m = Made()

    def drop(site: int, ratio: float = 0.5) -> Value:
        return m.b.Dropout(m.x, m.seed, None, ratio=ratio, site=site, sample_dim=-1)

    graph = m.out(drop(0), drop(1), drop(0), drop(1), drop(0, 0.25))
    assert common_subexpression_elimination(graph) == 2
    assert graph.outputs["o0"] is graph.outputs["o2"]
    assert graph.outputs["o1"] is graph.outputs["o3"]
    assert len(set(graph.outputs.values())) == 3


def test_cse_does_not_merge_what_stops_a_gradient_with_what_does_not() -> None:
    m = Made()
    graph = m.out(m.b.Identity(m.x), stopped(m.b, m.x), stopped(m.b, m.x))
    assert common_subexpression_elimination(graph) == 1
    assert graph.outputs["o0"] is not graph.outputs["o1"]


# ---- dead


def test_dead_removes_what_nobody_reads_and_keeps_outputs_and_inputs() -> None:
    m = Made()
    b = m.b
    kept = b.Exp(m.x)
    b.Add(b.Neg(m.y), 3.0)  # read by nobody: two nodes and a constant
    left, _ = b.Split(m.x, b.ints([1, 2]), axis=1)  # one of two results is read
    number = b.const(np.array(7.0))
    graph = m.out(kept, left, number, m.y)
    assert dead_code_elimination(graph) == 2
    assert sorted(ops(graph)) == ["Exp", "Split"]
    assert len(graph.ir.initializers) == 2
    assert graph.outputs["o2"] is number
    assert {v.name for v in graph.inputs} == {"x", "y", "seed"}


def test_prune_computes_only_what_is_asked_for() -> None:
    m = Made()
    graph = m.out(m.b.Exp(m.x), m.b.Neg(m.y))
    graph.state = {"o1": m.y}
    small = prune(graph, ["o0"])
    assert ops(small) == ["Exp"]
    assert not small.state
    assert len(graph) == 2


# ---- scatter_into


class Scatter(Made):
    def __init__(self) -> None:
        super().__init__("f32[4,2]")
        self.ids = self.graph.input("ids", parse_type("i64[3,1]"), Role.BATCH)
        self.rows = self.graph.input("rows", parse_type("f32[3,2]"), Role.BATCH)

    def on(self, data: Value, reduction: str | None = "add") -> Value:
        return self.b.ScatterND(data, self.ids, self.rows, reduction=reduction)

    @property
    def zeros(self) -> Value:
        return self.b.full(0.0, parse_type("f32[4,2]"))

    def feeds(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        return {
            "x": rng.integers(-8, 8, (4, 2)).astype(np.float32),
            "y": rng.integers(-8, 8, (4, 2)).astype(np.float32),
            "seed": np.zeros(2, np.int64),
            "ids": np.array([[1], [3], [1]]),
            "rows": rng.integers(-8, 8, (3, 2)).astype(np.float32),
        }


@pytest.mark.parametrize("swapped", [False, True])
def test_a_scatter_on_zeros_is_added_into_the_other_term(swapped: bool) -> None:
    m = Scatter()
    base, rows = m.b.Exp(m.x), m.on(m.zeros)
    graph = m.out(m.b.Add(rows, base) if swapped else m.b.Add(base, rows))
    want = evaluate(graph, m.feeds())["o0"]
    assert scatter_into(graph) == 1
    dead_code_elimination(graph)
    assert ops(graph) == ["Exp", "ScatterND"]
    np.testing.assert_allclose(evaluate(graph, m.feeds())["o0"], want, rtol=1e-6)


def test_scatters_add_up_one_into_the_next() -> None:
    m = Scatter()
    graph = m.out(
        m.b.Add(m.b.Add(m.x, m.on(m.zeros)), m.on(m.b.const(np.zeros((4, 2), np.float32))))
    )
    want = evaluate(graph, m.feeds())["o0"]
    assert scatter_into(graph) == 2
    np.testing.assert_array_equal(evaluate(graph, m.feeds())["o0"], want)  # whole numbers: exact


def test_scatters_that_cannot_move_stay() -> None:
    m = Scatter()
    shared, shown = m.on(m.zeros), m.on(m.zeros)
    column = m.b.const(np.ones((4, 1), np.float32))
    deep = m.b.const(np.ones((2, 1, 1), np.float32))
    graph = m.out(
        m.b.Add(m.x, shared), m.b.Neg(shared),  # read by another node
        m.b.Add(m.x, shown), shown,  # an output itself
        m.b.Add(m.x, m.on(m.y)),  # not on zeros
        m.b.Add(m.x, m.on(m.b.full(1.0, parse_type("f32[4,2]")))),
        m.b.Add(m.x, m.on(m.zeros, None)),  # rows are set, not added
        m.b.Add(m.x, m.on(m.zeros, "max")),
        m.b.Add(column, m.on(m.zeros)),  # the base is broadcast
        m.b.Add(deep, m.on(m.zeros)),
        m.b.Sub(m.x, m.on(m.zeros)),
    )  # fmt: skip
    twice = m.on(m.zeros)
    graph.outputs["twice"] = m.b.Add(twice, twice)
    before = ops(graph)
    assert scatter_into(graph) == 0
    assert ops(graph) == before


# ---- flash_attention


class Heads(Made):
    """Queries, keys and values `f32[2,3,T,4]`; a parameter, a buffer and a mask from outside."""

    def __init__(self) -> None:
        super().__init__("f32[2,3,T,4]")
        size = parse_type("f32[T,T]")
        self.trained = self.graph.input("bias", size, Role.PARAM)
        self.fixed = self.graph.input("triangle", size, Role.BUFFER)
        self.given = self.graph.input("mask", size, Role.BATCH)
        self.bits = self.graph.input("bits", parse_type("b[T,T]"), Role.BATCH)

    def attend(self, mask: Value | None = None, **attrs: int) -> Value:
        y: Value = self.b.Attention(
            self.x, self.y, self.x, mask, self.seed, None,
            **{"scale": 0.5, "is_causal": 0, "ratio": 0.25, "site": 3, "sample_dim": 0, **attrs},
        )  # fmt: skip
        return y


def test_attention_becomes_the_op_whose_gradient_keeps_no_scores() -> None:
    m = Heads()
    b = m.b
    masks = [
        None, m.bits, m.fixed, m.given, b.const(np.zeros((1, 1), np.float32)),
        b.Where(m.bits, b.Mul(m.fixed, 2.0), 0.0),
        stopped(b, m.trained),
    ]  # fmt: skip
    graph = m.out(*[m.attend(mask) for mask in masks], m.attend(m.bits, is_causal=1))
    before = [n for n in graph if n.op_type == "Attention"]
    kept = [(list(n.inputs), attributes(n)) for n in before]
    assert fused(flash_attention, graph) == len(masks) + 1
    after = [n for n in graph if n.op_type == "FlashAttention"]
    assert [(list(n.inputs), attributes(n)) for n in after] == kept
    assert [producer(v) for v in graph.outputs.values()] == after
    assert "Attention" not in ops(graph)
    assert fused(flash_attention, graph) == 0


def test_what_parameters_decide_of_a_mask_becomes_a_bias() -> None:
    m = Heads()
    b = m.b
    forms: dict[str, tuple[Value, list[Value], Value | None]] = {
        "trained": (m.trained, [m.trained], None),
        "a product": (b.Mul(m.fixed, b.Neg(m.trained)), [m.trained, m.fixed], None),
        "a sum": (b.Add(m.trained, m.given), [m.trained], m.given),
        "turned": (b.Add(m.given, m.trained), [m.trained], m.given),
        "twice": (b.Add(b.Add(m.trained, m.given), m.trained), [m.trained], m.given),
        "half stopped": (b.Add(m.trained, stopped(b, b.Mul(m.trained, 2.0))), [m.trained], None),
    }
    graph = m.out(*[m.attend(mask) for mask, _, _ in forms.values()])
    assert fused(flash_attention, graph) == len(forms)
    nodes = [n for n in graph if n.op_type == "FlashAttention"]
    for node, (_, trained, mask) in zip(nodes, forms.values(), strict=True):
        assert attributes(node)["bias_gradient"] == 1
        bias = node.inputs[8]
        assert bias is not None and str(type_of(bias)) == "f32[1,3,T,T]"
        assert mask is None or node.inputs[3] is mask
        assert set(trained) <= leaves(bias) and (mask is None or mask not in leaves(bias))


def leaves(value: Value) -> set[Value]:
    """The inputs of the graph that a value is made of."""
    node = value.producer()
    if node is None:
        return {value}
    return {leaf for x in node.inputs if x is not None for leaf in leaves(x)}


def test_attention_that_the_kernel_does_not_cover_stays() -> None:
    m = Heads()
    b = m.b
    one = b.slice(m.y, 0, 0, 1)
    flat = b.squeeze(b.slice(m.x, 0, 0, 1), [0])
    graph = m.out(
        m.attend(m.given, is_causal=1),
        b.Attention(m.x, one, one, scale=1.0, is_causal=0),  # keys that sequences share
        b.Attention(flat, flat, flat, scale=1.0, is_causal=0),  # three dims
    )
    before = ops(graph)
    why = reasons(flash_attention, graph, Fusible(Target(instructions="plain")))
    kernel, other = "FlashAttention: native.attention: ", "; triton.attention: not on cpu"
    assert why == [
        f"{kernel}an added mask and a causal one{other}",
        "sequences share keys", f"{kernel}3 dims{other}",
    ]  # fmt: skip
    assert ops(graph) == before


# ---- the lists


NAMES = [p.name for p in (*FORWARD, *STEP)]


def test_passes_are_named_after_their_functions_once_a_list() -> None:
    for passes in (FORWARD, STEP):
        names = [p.name for p in passes]
        assert len(names) == len(set(names))
    assert Pass(noop).name == "noop"


@pytest.mark.parametrize("name", sorted(set(NAMES)))
def test_a_pass_is_switched_off_by_its_name(name: str) -> None:
    m = Scatter()
    b = m.b
    b.Neg(m.x)  # for dead
    rest = b.Add(b.Exp(m.x), b.Exp(m.x))  # for cse
    folded = b.Add(b.ints([1]), b.ints([2]))  # for fold
    graph = m.out(b.Add(b.Mul(rest, 1.0), m.on(m.zeros)), folded)
    _, every = run(graph, STEP, verify=True)
    edited = {report.name for report in every if report.edits}
    assert edited == {
        "constant_folding",
        "noop",
        "common_subexpression_elimination",
        "scatter_into",
        "dead_code_elimination",
    }  # fusions have their own tests
    _, fewer = run(graph, STEP, disable=[name], verify=True)
    assert [r.name for r in fewer] == [r.name for r in every if r.name != name]
    assert len(graph) == len(m.graph), "run works on a copy"


def test_every_pass_is_reported_and_shown() -> None:
    m = Made()
    graph = m.out(m.b.Add(m.x, 0.0))
    seen: list[tuple[str, int]] = []
    after, reports = run(graph, FORWARD, after=lambda g, report: seen.append((report.name, len(g))))
    assert [(r.name, r.nodes) for r in reports] == seen
    assert {r.name: r.edits for r in reports if r.edits} == {"noop": 1}
    assert all(r.seconds >= 0 for r in reports)
    assert len(after) == 0
