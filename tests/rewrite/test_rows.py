"""Row demand, op by op: what it does not ask for may hold anything, and the packed graph says the
same. Both are judged by onnx's reference evaluator.

A construct makes `y` from `x f[B,T,8]`, which is computed from a parameter; a head with labels of
which some are ignored asks for rows of y.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from onward.differentiate import vjp
from onward.graph.build import Builder
from onward.graph.check import check
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.ops import named
from onward.graph.types import DType, parse_type, product
from onward.rewrite import Fusion
from onward.rewrite.rows import Demand, demands, row_demand, split_counting
from onward.rewrite.rows.demand import DEMAND
from onward.rewrite.rows.packer import PACK

B, T, D, CLASSES = 3, 5, 8, 4
SHAPES = {"B": B, "T": T}
LEAST = float(np.finfo(np.float32).min)
Env = dict[str, Value]


def _heads(b: Builder, x: Value) -> Value:
    """`[B,T,8] -> [B,2,T,4]`, as models do it."""
    batch, length, _ = type_of(x).shape
    return b.transpose(b.reshape(x, (batch, length, 2, 4)), [0, 2, 1, 3])


def _joined(b: Builder, y: Value) -> Value:
    batch, heads, length, width = type_of(y).shape
    assert isinstance(heads, int) and isinstance(width, int)
    return b.reshape(b.transpose(y, [0, 2, 1, 3]), (batch, length, heads * width))


def _attention(
    op: str = "FlashAttention", mask: str | None = None, causal: int = 0, drop: bool = False
) -> Callable[[Builder, Value, Env], Value]:
    def make(b: Builder, x: Value, env: Env) -> Value:
        q, k, v = (_heads(b, b.Mul(x, f)) for f in (0.5, 1.5, 2.0))
        attrs: dict[str, Any] = {"scale": 0.5, "is_causal": causal}
        draw = [None, None]
        if drop:
            attrs |= {"ratio": 0.25, "site": 3, "sample_dim": 0}
            draw = [env["seed"], env["offset"]]
        made = b.node(op, [q, k, v, None if mask is None else env[mask], *draw], attrs)
        return _joined(b, made[0] if isinstance(made, tuple) else made)

    return make


def _gemm(b: Builder, x: Value, env: Env) -> Value:
    flat = b.reshape(x, (product(type_of(x).shape[:2]), D))
    return b.reshape(b.Gemm(flat, env["w"], env["bias"], transB=1), type_of(x).shape)


def _rotated(b: Builder, x: Value, env: Env) -> Value:
    """Rotary embedding, with angles for each position."""
    cos, sin = b.Cos(env["table"]), b.Sin(env["table"])
    cos, sin = (b.reshape(v, (1, *type_of(v).shape[-2:])) for v in (cos, sin))
    return b.Rotary(x, cos, sin, interleaved=1, transposed=0)


def _rotated_heads(b: Builder, x: Value, env: Env) -> Value:
    angle = b.slice(env["table"], type_of(env["table"]).rank - 1, 0, 2)
    cos, sin = b.Cos(angle), b.Sin(angle)
    cos, sin = (b.reshape(v, (1, 1, *type_of(v).shape[-2:])) for v in (cos, sin))
    return _joined(b, b.Rotary(_heads(b, x), cos, sin, interleaved=0, transposed=0))


def _add_norm(drop: bool, root: bool = False) -> Callable[[Builder, Value, Env], Value]:
    def make(b: Builder, x: Value, env: Env) -> Value:
        inputs: list[Any] = [b.Tanh(x), x, *[env["bias"]] * (1 if root else 2)]
        attrs: dict[str, Any] = {"epsilon": 1e-5}
        if drop:
            inputs += [env["seed"], env["offset"]]
            attrs |= {"ratio": 0.5, "site": 1, "sample_dim": 0}
        made = b.node("AddRMSNorm" if root else "AddLayerNormalization", inputs, attrs)
        assert isinstance(made, tuple)
        return b.Add(made[0], made[-1])

    return make


def _dropout(b: Builder, x: Value, env: Env) -> Value:
    return b.Dropout(x, env["seed"], env["offset"], ratio=0.5, site=2, sample_dim=0)


def _split(b: Builder, x: Value, env: Env) -> Value:
    left, right = b.Split(x, b.ints([2, 6]), axis=2)
    return b.Concat(right, left, axis=2)


def _masked(b: Builder, x: Value, env: Env) -> Value:
    """The mean over real tokens, given back to every token."""
    weight = b.cast(b.unsqueeze(env["mask"], [2]), DType.FLOAT)
    total = b.ReduceSum(b.Mul(b.Tanh(x), weight), b.ints([1]), keepdims=1)
    return b.Add(b.expand(total, type_of(x).shape), 0.5)


def _filled(b: Builder, x: Value, env: Env) -> Value:
    real = b.unsqueeze(b.cast(env["mask"], DType.BOOL), [2])
    filled = b.Where(real, b.Exp(x), b.scalar(-1.0, DType.FLOAT))
    return b.expand(b.ReduceMax(filled, b.ints([1]), keepdims=1), type_of(x).shape)


def _first(b: Builder, x: Value, env: Env) -> Value:
    return b.reshape(b.slice(b.Tanh(x), 1, 0, 1), (type_of(x).shape[0], D))


def _picked(b: Builder, x: Value, env: Env) -> Value:
    return b.Gather(b.Tanh(x), np.array(2, np.int64), axis=1)


def _listed(b: Builder, x: Value, env: Env) -> Value:
    """The last real token of each sequence."""
    return b.GatherND(b.Tanh(x), env["last"])


def _rows_listed(b: Builder, x: Value, env: Env) -> Value:
    flat = b.reshape(b.Tanh(x), (product(type_of(x).shape[:2]), D))
    return b.Gather(flat, env["numbers"], axis=0)


def _later(b: Builder, x: Value, env: Env) -> Value:
    """Tokens from the second on, with a copy of the second in front."""
    y = b.Tanh(x)
    return b.Concat(b.slice(y, 1, 1, 2), b.slice(y, 1, 1, type_of(x).shape[1]), axis=1)


def _turned(b: Builder, x: Value, env: Env) -> Value:
    """The second token as a column, as a step of a scan reads its state: `[B,1,8] -> [B,8,1]`."""
    (batch, length, _), y = type_of(x).shape, b.Tanh(x)
    first, token, others = (b.slice(y, 1, *at) for at in ((0, 1), (1, 2), (2, length)))
    column = b.Exp(b.reshape(token, (batch, D, 1)))
    return b.Concat(first, b.transpose(column, [0, 2, 1]), others, axis=1)


def _over_tokens(b: Builder, x: Value, env: Env) -> Value:
    return b.Softmax(b.Tanh(x), axis=1)


def _half(b: Builder, x: Value, env: Env) -> Value:
    return b.Concat(b.slice(b.Tanh(x), 2, 0, 3), b.slice(x, 2, 3, 8), axis=2)


def _scores(b: Builder, x: Value, env: Env) -> Value:
    """f[B,T]: one for each token."""
    return b.ReduceSum(b.Mul(x, env["bias"]), b.ints([2]), keepdims=0)


def _hidden(b: Builder, x: Value, env: Env, fill: float = -np.inf) -> Value:
    """f[B,T]: scores, hidden where the mask is 0."""
    real = b.cast(env["mask"], DType.BOOL)
    return b.Where(real, _scores(b, x, env), b.scalar(fill, DType.FLOAT))


def _weighted(form: str, fill: float = -np.inf) -> Callable[[Builder, Value, Env], Value]:
    """Sums over the tokens whose weights a softmax makes, `f[B,8]`."""

    def make(b: Builder, x: Value, env: Env) -> Value:
        batch, length, _ = type_of(x).shape
        match form:
            case "added":
                low = b.Mul(
                    b.Sub(b.scalar(1.0, DType.FLOAT), b.cast(env["mask"], DType.FLOAT)), fill
                )
                w = b.Softmax(b.Add(_scores(b, x, env), low), axis=-1)
            case "exp":
                e = b.Exp(_hidden(b, x, env, fill))
                w = b.Div(e, b.ReduceSum(e, b.ints([1]), keepdims=1))
            case "renormalised":
                w = b.Mul(b.Softmax(_scores(b, x, env), axis=1), b.cast(env["mask"], DType.FLOAT))
                w = b.Div(w, b.ReduceSum(w, b.ints([1]), keepdims=1))
            case "dropped":
                w = b.Softmax(_hidden(b, x, env, fill), axis=-1)
                w = b.Dropout(w, env["seed"], env["offset"], ratio=0.5, site=4, sample_dim=0)
            case "tokens first":
                turned = b.transpose(_hidden(b, x, env, fill), [1, 0])
                w = b.transpose(b.Softmax(turned, axis=0), [1, 0])
            case _:
                w = b.Softmax(_hidden(b, x, env, fill), axis=-1)
        h = b.Tanh(x)
        match form:
            case "product and sum":
                return b.ReduceSum(b.Mul(b.unsqueeze(w, [2]), h), b.ints([1]), keepdims=0)
            case "behind":
                y = b.MatMul(b.transpose(h, [0, 2, 1]), b.unsqueeze(w, [2]))
                return b.squeeze(y, [2])
            case "both computed":
                w2 = b.Softmax(_hidden(b, h, env, fill), axis=-1)
                w = b.Mul(w, w2)
        return b.reshape(b.MatMul(b.reshape(w, (batch, 1, length)), h), (batch, D))

    return make


def _by_mask(form: str) -> Callable[[Builder, Value, Env], Value]:
    """Sums and maxima over the real tokens, `f[B,8]`."""

    def make(b: Builder, x: Value, env: Env) -> Value:
        shape, h = type_of(x).shape, b.Tanh(x)
        mask = b.cast(env["mask"], DType.FLOAT)
        match form:
            case "product":
                return b.reshape(b.MatMul(b.unsqueeze(mask, [1]), h), (shape[0], D))
            case "expanded":
                wide = b.expand(b.unsqueeze(mask, [2]), shape)
                return b.ReduceSum(b.Mul(h, wide), b.ints([1]), keepdims=0)
            case "segments":  # real tokens of each of three kinds
                kinds = b.unsqueeze(b.Mod(env["ids"], b.const(np.array(3))), [2])
                which = b.Equal(kinds, b.const(np.arange(3).reshape(1, 1, 3)))
                hot = b.Mul(b.cast(which, DType.FLOAT), b.unsqueeze(mask, [2]))
                each = b.MatMul(b.transpose(hot, [0, 2, 1]), h)
                return b.ReduceSum(b.Exp(each), b.ints([1]), keepdims=0)
            case "largest":
                gone = b.Equal(b.expand(b.unsqueeze(mask, [2]), shape), 0.0)
                filled = b.Where(gone, b.scalar(-1e9, DType.FLOAT), h)
                at = b.ArgMax(filled, axis=1, keepdims=1)
                return b.squeeze(b.GatherElements(filled, at, axis=1), [1])
            case "tokens first":
                turned = b.transpose(h, [1, 0, 2])
                taken = b.Mul(turned, b.unsqueeze(b.transpose(mask, [1, 0]), [2]))
                return b.ReduceSum(taken, b.ints([0]), keepdims=0)
            case _:
                at = b.unsqueeze(b.unsqueeze(b.slice(env["place"], 0, 0, shape[0]), [1]), [2])
                picked = b.GatherElements(h, b.expand(at, (shape[0], 1, D)), axis=1)
                return b.squeeze(picked, [1])

    return make


def _tokens_first(b: Builder, x: Value, env: Env) -> Value:
    """A layer computed on `[T,B,8]`, the tokens first."""
    y = _add_norm(False)(b, b.transpose(x, [1, 0, 2]), env)
    flat = b.reshape(y, (product(type_of(y).shape[:2]), D))
    y = b.reshape(b.Gemm(flat, env["w"], env["bias"], transB=1), type_of(y).shape)
    return b.transpose(y, [1, 0, 2])


def _layers(b: Builder, x: Value, env: Env) -> Value:
    for _ in range(2):
        x = _add_norm(True)(b, _attention(mask="keys")(b, x, env), env)
    return x


@dataclass(frozen=True)
class Construct:
    """make: y from x. saves: whether some row of x is free. per: what the labels belong to."""

    make: Callable[[Builder, Value, Env], Value]
    saves: bool = True
    per: str = "token"


CONSTRUCTS: dict[str, Construct] = {
    "elementwise": Construct(lambda b, x, e: b.Tanh(b.Mul(b.Add(x, e["bias"]), x))),
    "positions": Construct(lambda b, x, e: b.Add(x, b.Mul(e["table"], 2.0))),
    "looked up": Construct(lambda b, x, e: b.Add(x, b.Gather(e["words"], e["ids"], axis=0))),
    "looked up, a padding id": Construct(
        lambda b, x, e: b.Add(x, b.Embedding(e["words"], e["ids"], padding_idx=1))
    ),
    "positions looked up": Construct(
        lambda b, x, e: b.Add(
            x, b.Gather(e["words"], b.unsqueeze(b.arange(type_of(x).shape[1]), [0]), axis=0)
        )
    ),
    "per sequence": Construct(lambda b, x, e: b.Add(x, b.Mul(e["each"], 2.0))),
    "per sequence, features first": Construct(
        lambda b, x, e: b.transpose(
            b.Mul(b.transpose(x, [0, 2, 1]), b.transpose(e["each"], [0, 2, 1])), [0, 2, 1]
        )
    ),
    "expand": Construct(lambda b, x, e: b.Add(x, b.expand(e["bias"], type_of(x).shape))),
    "product": Construct(_gemm),
    "MatMul": Construct(lambda b, x, e: b.MatMul(x, b.transpose(e["w"], [1, 0]))),
    "activation": Construct(lambda b, x, e: b.BiasActivation(x, e["bias"], activation="gelu")),
    "gated": Construct(lambda b, x, e: b.GatedActivation(x, b.Tanh(x), activation="silu")),
    "norm by the root of the mean square": Construct(
        lambda b, x, e: b.RMSNorm(x, e["bias"], epsilon=1e-5)
    ),
    "turned by positions": Construct(_rotated),
    "some features turned, by heads": Construct(_rotated_heads),
    "residual and norm by the root": Construct(_add_norm(False, root=True)),
    "residual, dropout and norm by the root": Construct(_add_norm(True, root=True)),
    "norm": Construct(lambda b, x, e: b.LayerNormalization(x, e["bias"], e["bias"])[0]),
    "residual and norm": Construct(_add_norm(False)),
    "residual, dropout and norm": Construct(_add_norm(True)),
    "dropout": Construct(_dropout),
    "softmax of features": Construct(lambda b, x, e: b.Softmax(x, axis=-1)),
    "softmax of tokens": Construct(_over_tokens, saves=False),
    "split and joined": Construct(_split),
    "features sliced": Construct(_half),
    "tokens sliced and joined": Construct(_later),
    "a token turned": Construct(_turned),
    "sum of features": Construct(
        lambda b, x, e: b.Add(x, b.ReduceMean(b.Exp(x), b.ints([2]), keepdims=1))
    ),
    "sum of features, dim gone": Construct(
        lambda b, x, e: b.Add(x, b.unsqueeze(b.ReduceSum(x, b.ints([-1]), keepdims=0), [2]))
    ),
    "sum over tokens": Construct(
        lambda b, x, e: b.Add(x, b.ReduceSum(x, b.ints([1]), keepdims=1)), saves=False
    ),
    "mean of real tokens": Construct(_masked),
    "filled where not real": Construct(_filled),
    "first token": Construct(_first, per="sequence"),
    "one token": Construct(_picked, per="sequence"),
    "last token": Construct(_listed, per="sequence"),
    "rows by number": Construct(_rows_listed, per="sequence"),
    "attention": Construct(_attention(), saves=False),
    "attention, taken apart": Construct(_attention("Attention"), saves=False),
    "attention, mask": Construct(_attention(mask="keys")),
    "attention, mask, dropout": Construct(_attention(mask="keys", drop=True)),
    "attention, causal": Construct(_attention(causal=1)),
    "attention, causal, mask": Construct(_attention(mask="keys", causal=1, drop=True)),
    "attention, mask of pairs": Construct(_attention(mask="pairs")),
    "attention, one mask for all": Construct(_attention(mask="shared")),
    "attention, added mask": Construct(_attention("Attention", mask="added")),
    "attention, added pairs": Construct(_attention("Attention", mask="added pairs")),
    "attention, weak mask": Construct(_attention("Attention", mask="weak"), saves=False),
    "layers": Construct(_layers),
    "tokens first": Construct(_tokens_first),
    **{
        f"weights, {form}": Construct(_weighted(form), per="sequence")
        for form in (
            "product", "product and sum", "behind", "exp", "renormalised", "dropped",
            "tokens first", "both computed",
        )
    },
    "weights, hidden by the least number": Construct(_weighted("product", LEAST), per="sequence"),
    "weights, a weak fill": Construct(_weighted("product", -1.0), per="sequence"),
    "weights, the least number added": Construct(_weighted("added", LEAST), per="sequence"),
    **{
        f"real tokens, {form}": Construct(_by_mask(form), per="sequence")
        for form in ("product", "expanded", "segments", "largest", "tokens first", "at a place")
    },
}  # fmt: skip


def graph_of(construct: Construct) -> Graph:
    graph = Graph("construct")

    def given(name: str, text: str, role: Role) -> Value:
        return graph.input(name, parse_type(text), role)

    ids = given("ids", "i64[B,T]", Role.BATCH)  # the first: sizes are read from it
    p = given("p", "f32[B,T,8]", Role.PARAM)
    env = {
        "w": given("w", "f32[8,8]", Role.PARAM),
        "bias": given("bias", "f32[8]", Role.PARAM),
        "table": given("table", "f32[1,T,8]", Role.PARAM),
        "each": given("each", "f32[B,1,8]", Role.PARAM),
        "words": given("words", "f32[9,8]", Role.PARAM),
        "ids": ids,
        "mask": given("mask", "i64[B,T]", Role.BATCH),
        "pairs": given("pairs", "b[B,1,T,T]", Role.BATCH),
        "shared": given("shared", "b[1,1,T,T]", Role.BATCH),
        "added pairs": given("added pairs", "f32[B,1,T,T]", Role.BATCH),
        "last": given("last", "i64[B,2]", Role.BATCH),
        "numbers": given("numbers", "i64[B]", Role.BATCH),
        "place": given("place", "i64[B]", Role.BATCH),
        "seed": given("seed", "i64[2]", Role.RANDOM),
        "offset": given("offset", "i64[]", Role.RANDOM),
    }
    head = given("head", "f32[4,8]", Role.PARAM)
    each = construct.per == "token"
    labels = given("labels", "i64[B,T]" if each else "i64[B]", Role.BATCH)
    b = Builder(graph)
    keys = b.unsqueeze(b.cast(env["mask"], DType.BOOL), [1, 2])  # b[B,1,1,T]
    zero = b.scalar(0.0, DType.FLOAT)
    env["keys"] = keys
    env["added"] = b.Where(keys, zero, b.scalar(LEAST, DType.FLOAT))
    env["weak"] = b.Where(keys, zero, b.scalar(-10000.0, DType.FLOAT))
    x = b.Neg(p)
    x.name = "x"
    y = construct.make(b, x, env)
    flat = b.reshape(y, (product(type_of(y).shape[:-1]), D))
    wanted = b.reshape(labels, type_of(flat).shape[:1])
    loss = b.one(
        "LinearCrossEntropy", [flat, head, None, wanted, None],
        {"ignore_index": -100, "reduction": "mean"},
    )  # fmt: skip
    graph.outputs = {"loss": loss}
    check(graph)
    return graph


def feeds(seed: int, mask: np.ndarray | None = None) -> dict[str, np.ndarray]:
    """Random numbers; a mask with holes at both ends and in the middle."""
    rng = np.random.default_rng(seed)
    if mask is None:
        mask = np.array([[1, 1, 0, 1, 0], [0, 1, 1, 0, 0], [1, 0, 0, 0, 1]])
    labels = rng.integers(0, CLASSES, (B, T))
    labels[:, ::2] = -100
    pairs = np.tril(rng.random((B, 1, T, T)) < 0.7)
    pairs[:, :, np.arange(T), np.arange(T)] = True
    pairs[..., -2:] = False
    return {
        **{n: rng.normal(size=s).astype(np.float32) for n, s in {
            "p": (B, T, D), "w": (D, D), "bias": (D,), "table": (1, T, D), "each": (B, 1, D),
            "words": (9, D), "head": (CLASSES, D),
        }.items()},
        "ids": rng.integers(0, 9, (B, T)), "mask": mask.astype(np.int64), "pairs": pairs,
        "shared": np.broadcast_to(np.arange(T) < 3, (1, 1, T, T)).copy(),
        "added pairs": np.where(pairs, 0.0, LEAST).astype(np.float32),
        "last": np.stack([np.arange(B), [3, -3, 4]], 1), "numbers": np.array([0, 7, 11]),
        "place": np.array([3, 0, 4]),
        "seed": np.array([5, 7]), "offset": np.array(0),
        "labels": labels, "cotangent.loss": np.array(1.0, np.float32),
    }  # fmt: skip


def fed(construct: Construct, seed: int, **more: Any) -> dict[str, np.ndarray]:
    data = feeds(seed, **more)
    if construct.per == "sequence":
        data["labels"] = np.array([2, 0, -100])  # of a sequence that may be empty too
    return data


def rows_of(graph: Graph, demand: Demand, data: dict[str, np.ndarray]) -> np.ndarray:
    """`b[B,T]`: the rows of x that a demand asks for."""
    from onward.rewrite.rows.set_masks import set_value

    if demand.rows is None:
        return np.ones((B, T), bool)
    sizes = tuple(parse_type("f32[B,T,8]").shape[d] for d in demand.dims)
    probe = graph.clone()
    asked = demands(probe, ["loss"])
    x = next(v for v in asked if v.name == "x")
    found = asked[x]
    assert found.rows is not None
    probe.outputs = {"rows": set_value(Builder(probe), found.rows, product(sizes))}
    have = evaluate(probe, data)["rows"].reshape([SHAPES[str(s)] for s in sizes])
    return np.broadcast_to(have.reshape([*have.shape, *[1] * (2 - have.ndim)]), (B, T))


@pytest.mark.parametrize("name", CONSTRUCTS)
def test_rows_that_nobody_asks_for_may_hold_anything(name: str) -> None:
    construct = CONSTRUCTS[name]
    graph, data = graph_of(construct), fed(construct, 1)
    asked = demands(graph, ["loss"])
    demand = next(d for v, d in asked.items() if v.name == "x")
    needed = rows_of(graph, demand, data)
    assert (not needed.all()) == construct.saves, str(needed)
    before = evaluate(graph, data)["loss"]
    other = dict(data)
    noise = np.random.default_rng(9).normal(size=(B, T, D)).astype(np.float32) * 5
    other["p"] = np.where(needed[..., None], data["p"], noise)
    np.testing.assert_array_equal(evaluate(graph, other)["loss"], before)
    moved = dict(data)
    moved["p"] = np.where(needed[..., None], data["p"] + 1 + noise, data["p"])
    assert evaluate(graph, moved)["loss"] != before, "the probe cannot fail"


def packing(fusion: Fusion) -> str | None:
    """A kernel refusal for every op but FlashAttention, so that only this one takes packed rows."""
    return None if fusion.op == "FlashAttention" else "no kernel"


def gradients(graph: Graph, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [v.name or "" for v in graph.inputs_with(Role.PARAM)]
    return evaluate(vjp(graph, ["loss"], names), data)


MASKS = {
    "holes": None,
    "no padding": np.ones((B, T), int),
    "left": np.array([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
    "an empty sequence": np.array([[1, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]]),
    "one token": np.array([[1, 0, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 0, 0, 1]]),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", CONSTRUCTS)
def test_the_packed_graph_says_the_same(name: str, kind: str) -> None:
    construct = CONSTRUCTS[name]
    graph, data = graph_of(construct), fed(construct, 2, mask=MASKS[kind])
    if name == "mean of real tokens" and kind == "an empty sequence":
        pytest.skip("nothing is real")
    made, report = row_demand(graph, ["loss"], packing)
    packed = made.graph
    check(packed)
    assert report.edits > 0
    want, have = gradients(graph, data), gradients(packed, data)
    assert set(want) == set(have)
    if name == "weights, renormalised" and kind == "an empty sequence":
        # 0 / 0: a sequence whose mask has none of the weights has a loss of NaN, in eager too
        assert np.isnan(want["loss"]) and np.isnan(have["loss"])
        return
    for key, number in want.items():
        np.testing.assert_allclose(have[key], number, rtol=2e-4, atol=2e-6, err_msg=key)


def test_no_label_at_all_is_not_a_number_and_moves_nothing() -> None:
    construct = CONSTRUCTS["layers"]
    graph, data = graph_of(construct), fed(construct, 3)
    data["labels"][:] = -100
    packed, _ = row_demand(graph, ["loss"], packing)
    found = gradients(packed.graph, data)
    assert np.isnan(found.pop("loss"))
    assert all(not np.nan_to_num(g).any() for g in found.values())


def test_every_rule_is_used_by_a_construct() -> None:
    """Each rule of either table is used by a construct, so that none goes untested."""
    used = {node.op_type for c in CONSTRUCTS.values() for node in graph_of(c)}
    alike = {  # rules of one function with an op that is used
        "Identity", "LogSoftmax", "ReduceMin", "ReduceL2", "ReduceSumSquare", "ReduceProd",
        "Squeeze", "SoftmaxCrossEntropyLoss", "CrossEntropyLoss", *named("elementwise"),
    }  # fmt: skip
    assert {*DEMAND, *PACK} <= used | alike


def test_counting_is_apart_from_the_step() -> None:
    data = feeds(4)
    graph = row_demand(graph_of(CONSTRUCTS["layers"]), ["loss"], packing)[0].graph
    conditions, step = split_counting(graph)
    assert all(n.op_type != "Rows" for n in [*conditions, *step])
    found = evaluate(conditions, data)
    labelled, real = data["labels"].reshape(-1) != -100, data["mask"].reshape(-1) != 0
    seen = real & np.repeat(labelled.reshape(B, T).any(1), T)
    assert [f.tolist() for f in found.values()] == [(seen | labelled).tolist(), labelled.tolist()]
    numbers = {f"rows.{size}": np.flatnonzero(rows) for size, rows in found.items()}
    whole, parts = evaluate(graph, data), evaluate(step, {**data, **numbers})
    np.testing.assert_array_equal(whole["loss"], parts["loss"])
    rows = {str(type_of(v)) for v in step.inputs if (v.name or "").startswith("rows.")}
    assert rows == {"i64[R0]", "i64[R1]"}


def test_what_keeps_rows_is_named() -> None:
    graph = graph_of(CONSTRUCTS["sum over tokens"])
    (why,) = {d.why for d in demands(graph, ["loss"]).values() if d.whole and d.why}
    assert why == "ReduceSum at (top): it sums over the rows"


def test_outputs_that_are_taken_keep_their_rows() -> None:
    graph = graph_of(CONSTRUCTS["attention, mask"])
    maker = graph.outputs["loss"].producer()
    assert maker is not None and maker.inputs[0] is not None
    graph.outputs["hidden"] = maker.inputs[0]
    data = fed(CONSTRUCTS["attention, mask"], 5)
    asked = demands(graph, ["loss", "hidden"])
    assert asked[maker.inputs[0]].why == "output 'hidden'"
    want = evaluate(graph, data)
    packed, _ = row_demand(graph, ["loss", "hidden"], packing)
    have = evaluate(packed.graph, data)
    for key in ("loss", "hidden"):
        np.testing.assert_allclose(have[key], want[key], rtol=1e-5, atol=1e-6)
