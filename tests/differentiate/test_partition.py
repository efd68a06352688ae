"""The two halves of a graph with gradients: what each computes, what lies between, what is refused.

The oracle is the whole graph under onnx's reference evaluator, whose gradients `test_rules.py` and
`test_walk.py` compare with differences and autograd; and torch's autograd for cotangents of several
outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gradient_calls import CALLS, STATISTICS
from op_cases import OpCase, stopped

from onward.differentiate import Halves, Recipe, UpdateGroup, add_updates, partition, vjp
from onward.graph.build import Builder
from onward.graph.check import check
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role, Value, role_of, type_of
from onward.graph.ops.optimizers import OPTIMIZERS
from onward.graph.types import DType, parse_type

Arrays = dict[str, np.ndarray]


def cotangents_of(graph: Graph, seed: int = 0) -> Arrays:
    """Random ones, for every floating output."""
    rng = np.random.default_rng(seed)
    found: Arrays = {}
    for name, value in graph.outputs.items():
        if type_of(value).is_floating:
            shape = [int(n) for n in type_of(value).shape]  # type: ignore[arg-type]
            found[name] = rng.standard_normal(shape).astype(type_of(value).dtype.numpy())
    return found


def run(graph: Graph, given: Arrays) -> Arrays:
    """The graph's outputs, from those of the given arrays that it has inputs for."""
    names = {v.name for v in graph.inputs}
    return evaluate(graph, {n: x for n, x in given.items() if n in names}) if graph.outputs else {}


def split_run(halves: Halves, feeds: Arrays, cotangents: Arrays) -> tuple[Arrays, Arrays]:
    """Outputs and gradients, each half run by itself: nothing but residuals goes from one to the
    other, and leaves of the batch are not given to the second."""
    first = run(halves.forward, feeds)
    saved = {n: first.pop(n) for n in halves.forward.signature.residuals}
    batch = {v.name for v in halves.forward.inputs if role_of(v) is Role.BATCH}
    again = {n: x for n, x in feeds.items() if n not in batch}
    assert set(saved) == {v.name for v in halves.backward.inputs_with(Role.RESIDUAL)}
    return first, run(halves.backward, again | saved | cotangents)


# the reference evaluator's ConvTranspose, which is in the gradient of Conv, knows no groups
EVALUATED = [c for c in CALLS if c.op != "Conv" or "group" not in c.attrs]


@pytest.mark.parametrize("case", EVALUATED, ids=lambda case: case.label)
def test_halves_of_each_op(case: OpCase) -> None:
    """Every rule's gradients, to the bit, for random cotangents of all of the op's outputs."""
    graph = case.graph(DType.DOUBLE)
    statistics = {f"y{i}" for i in STATISTICS.get(case.op, ())}
    feeds = case.feeds(DType.DOUBLE)
    given = {n: x for n, x in cotangents_of(graph).items() if n not in statistics}
    whole = vjp(graph, list(given), case.real)
    vectors = {whole.signature.cotangents[n]: x for n, x in given.items()}
    halves = partition(whole)
    for half in (halves.forward, halves.backward):
        check(half)
    wanted = run(whole, feeds | vectors)
    outputs, gradients = split_run(halves, feeds, vectors)
    assert set(outputs) | set(gradients) == set(wanted)
    for name, found in (outputs | gradients).items():
        np.testing.assert_array_equal(found, wanted[name], err_msg=name, strict=True)


def graph_of(
    types: dict[str, str], roles: dict[str, Role], write: Callable[..., dict[str, Value]]
) -> Graph:
    graph = Graph("f")
    inputs = {
        name: graph.input(name, parse_type(text), roles.get(name, Role.BATCH))
        for name, text in types.items()
    }
    graph.outputs = write(Builder(graph, module="model"), inputs)
    return graph


TYPES = {"x": "f64[3,4]", "w": "f64[4,4]", "v": "f64[4]"}
TRAINED = {"w": Role.PARAM, "v": Role.PARAM}


def _two_ends(b: Builder, i: dict[str, Value]) -> dict[str, Value]:
    h = b.Tanh(b.MatMul(i["x"], i["w"]))
    y = b.Mul(h, i["v"])
    return {"y": y, "score": b.ReduceSum(b.Mul(y, h), keepdims=0), "turned": b.transpose(h, [1, 0])}


def _two_ends_torch(x: Any, w: Any, v: Any) -> dict[str, Any]:
    h = torch.tanh(x @ w)
    y = h * v
    return {"y": y, "score": (y * h).sum(), "turned": h.t()}


@pytest.mark.parametrize("ends", [["y"], ["score"], ["turned"], ["y", "score", "turned"]], ids=str)
def test_cotangents_of_several_outputs(ends: list[str]) -> None:
    graph = graph_of(TYPES, TRAINED, _two_ends)
    rng = np.random.default_rng(2)
    feeds = {n: rng.standard_normal(parse_type(t).shape) for n, t in TYPES.items()}  # type: ignore[arg-type]
    given = {n: x for n, x in cotangents_of(graph).items() if n in ends}
    whole = vjp(graph, ends, ["w", "v", "x"])
    vectors = {whole.signature.cotangents[n]: x for n, x in given.items()}
    outputs, gradients = split_run(partition(whole), feeds, vectors)
    tensors = {n: torch.tensor(x, requires_grad=True) for n, x in feeds.items()}
    results = _two_ends_torch(**tensors)
    wanted = torch.autograd.grad(
        [results[n] for n in ends],
        [tensors[n] for n in ("w", "v", "x")],
        [torch.tensor(given[n]) for n in ends],
        allow_unused=True,
    )
    for name, y in results.items():
        np.testing.assert_allclose(outputs[name], y.detach().numpy(), rtol=1e-12)
    for name, want in zip(("w", "v", "x"), wanted, strict=True):
        assert (want is None) == (f"grad.{name}" not in gradients)
        if want is not None:
            np.testing.assert_allclose(gradients[f"grad.{name}"], want.numpy(), rtol=1e-10)


def saved_of(write: Callable[..., dict[str, Value]], wrt: list[str]) -> list[str]:
    """The ops whose results are saved, in order; inputs by their names."""
    whole = vjp(graph_of(TYPES, TRAINED, write), ["y"], wrt)
    halves = partition(whole)
    found: list[str] = []
    for name in halves.forward.signature.residuals:
        value = halves.forward.outputs[name]
        maker = value.producer()
        found.append(str(value.name) if maker is None else maker.op_type)
    return found


def test_a_leaf_of_the_batch_is_saved_and_a_parameter_is_not() -> None:
    def product(b: Builder, i: dict[str, Value]) -> dict[str, Value]:
        return {"y": b.MatMul(b.MatMul(i["x"], i["w"]), i["w"])}

    assert saved_of(product, ["w"]) == ["x", "MatMul"]


def test_a_view_is_shown_again_and_not_saved() -> None:
    """Of `tanh(x).T`, read by a product's gradient, and of its parts, only `tanh(x)`."""

    def views(b: Builder, i: dict[str, Value]) -> dict[str, Value]:
        h = b.Tanh(i["x"])
        left, right = b.Split(b.transpose(h, [1, 0]), b.ints([2, 2]), axis=0)
        turned = b.Concat(b.reshape(left, (2, 3)), b.slice(right, 0, 0, 2), axis=0)
        return {"y": b.Mul(b.MatMul(i["w"], turned), b.transpose(h, [1, 0]))}

    assert saved_of(views, ["w"]) == ["Tanh", "Concat"]


def test_what_needs_no_cotangent_is_computed_late() -> None:
    """A factor that only the backward reads is no work of the forward half."""
    whole = vjp(graph_of(TYPES, TRAINED, lambda b, i: {"y": b.Sin(i["w"])}), ["y"], ["w"])
    halves = partition(whole)
    assert [n.op_type for n in halves.forward] == ["Sin"]
    assert [n.op_type for n in halves.backward] == ["Cos", "Mul"]
    assert halves.forward.signature.residuals == ()


def test_no_residual_where_no_gradient_passes() -> None:
    whole = vjp(
        graph_of(TYPES, TRAINED, lambda b, i: {"y": b.Mul(stopped(b, b.Exp(i["x"])), i["v"])}),
        ["y"],
        ["v"],
    )
    halves = partition(whole)
    assert [n.op_type for n in halves.forward] == ["Exp", "Identity", "Mul"]
    assert [role_of(v) for v in halves.backward.inputs] == [Role.COTANGENT, Role.RESIDUAL]


def test_zeros_are_a_gradient_of_the_backward_half() -> None:
    graph = graph_of(TYPES, TRAINED, lambda b, i: {"y": b.Sin(i["v"])})
    halves = partition(vjp(graph, ["y"], ["v", "w"], zeros=["w"]))
    feeds = {n: np.ones([3, 4] if n == "x" else [4, 4] if n == "w" else [4]) for n in TYPES}
    _, gradients = split_run(halves, feeds, {"cotangent.y": np.ones(4)})
    np.testing.assert_array_equal(gradients["grad.w"], np.zeros((4, 4)))
    np.testing.assert_array_equal(gradients["grad.v"], np.cos(np.ones(4)))


@pytest.mark.parametrize("taken", ["residual.x", "x", "grad.w", "cotangent.y"])
def test_names_that_are_taken(taken: str) -> None:
    """An output of the user's may have any name."""

    def write(b: Builder, i: dict[str, Value]) -> dict[str, Value]:
        return {taken: b.Exp(i["x"]), "y": b.MatMul(i["x"], i["w"])}

    graph = graph_of(TYPES, TRAINED, write)
    whole = vjp(graph, ["y"], ["w"])
    rng = np.random.default_rng(2)
    feeds = {n: rng.standard_normal(parse_type(t).shape) for n, t in TYPES.items()}  # type: ignore[arg-type]
    dy = {whole.signature.cotangents["y"]: rng.standard_normal((3, 4))}
    outputs, gradients = split_run(partition(whole), feeds, dy)
    np.testing.assert_allclose(outputs[taken], np.exp(feeds["x"]))
    (dw,) = gradients.values()
    np.testing.assert_allclose(dw, feeds["x"].T @ next(iter(dy.values())), rtol=1e-12)


def test_an_output_that_needs_a_cotangent_is_refused() -> None:
    graph = graph_of(TYPES, TRAINED, lambda b, i: {"y": b.Sin(i["v"])})
    whole = vjp(graph, ["y"], ["v"])
    given = whole.find_input("cotangent.y")
    whole.outputs["early"] = Builder(whole).Neg(given)
    with pytest.raises(ValueError, match=r"Neg needs a cotangent before .*`rewrite\.halves`"):
        partition(whole)


def test_updates_are_refused() -> None:
    graph = graph_of({"w": "f32[4]"}, TRAINED, lambda b, i: {"y": b.Sin(i["w"])})
    attributes = {"momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": 0}
    group = UpdateGroup(0, ("w",), OPTIMIZERS["SGD"], attributes)
    step = add_updates(vjp(graph, ["y"], ["w"]), Recipe((group,)))
    with pytest.raises(ValueError, match=r"updates a state, and halves have none"):
        partition(step)
