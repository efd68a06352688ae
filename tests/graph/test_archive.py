"""Graphs as bytes: nothing is lost, everything shows in the digest, nothing else is read."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import tiny
import torch
from tiny import Compiled, batch, trained

from onward.graph.archive import ArchiveError, digest, from_bytes, to_bytes
from onward.graph.build import Builder
from onward.graph.check import check
from onward.graph.file import to_proto
from onward.graph.graph import Graph, Node, Role, Value, array_of
from onward.graph.printer import graph_text
from onward.graph.signature import Hyperparameter, Slot
from onward.graph.types import parse_type, symbol


def small() -> Graph:
    """Something of everything that a graph holds."""
    graph = Graph("small")
    x = graph.input("batch.x", parse_type("f32[B,T,4]"), Role.BATCH)
    w = graph.input("param.w", parse_type("f32[4,4]"), Role.PARAM)
    graph.input("lr", parse_type("f64[]"), Role.HYPER)
    sizes = graph.input("sizes", parse_type("i64[2]"), Role.SIZE)
    sizes.meta["content"] = (symbol("B") * symbol("T"), 4)
    b = Builder(graph, module="layers.0")
    h = b.MatMul(x, w)
    scale = graph.constant(np.array([1, 2, 3, 4.5], np.float32))
    h = b.LayerNormalization(h, scale, epsilon=0.1)[0]
    h = b.Mul(h, graph.constant(np.zeros((1, 1, 4), np.float32)))
    y = Builder(graph, backward=True).one("Reshape", [h, sizes], {"allowzero": 0})
    node(graph, "Reshape").meta.update(backward=True, sequences=symbol("B") * 3 + 1)
    graph.output("loss", y)
    graph.output("w.next", b.Neg(w), source=w)
    graph.counts = {"R", "S"}
    graph.signature = graph.signature.but(
        loss="loss", seed="sizes", hyperparameters={Hyperparameter(0, "lr"): "lr"},
        clocks={3: "lr"}, slots={Slot("param.w", "exp_avg"): "param.w"},
        updated={"param.w": "w.next"}, split_halves=True, rows={"R": "sizes"},
    )  # fmt: skip
    return graph


def node(graph: Graph, op: str) -> Node:
    return next(n for n in graph if n.op_type == op)


def to_the_front(graph: Graph, op: str) -> None:
    moved = node(graph, op)
    graph.ir.remove([moved])
    graph.ir.insert_before(next(iter(graph)), moved)


def attribute(name: str, value: float) -> Callable[[Graph], Any]:
    def change(graph: Graph) -> None:
        node(graph, "LayerNormalization").attributes[name] = ir.AttrFloat32(name, value)

    return change


def constant(value: Value) -> np.ndarray:
    array = array_of(value)
    assert array is not None
    return array


def bits(graph: Graph) -> None:
    """The least change of the first constant."""
    value = next(iter(graph.ir.initializers.values()))
    array = constant(value).copy()
    array[-1] = np.nextafter(array[-1], np.float32(9))
    value.const_value = ir.tensor(array, name=value.name)


def signature(**entries: Any) -> Callable[[Graph], None]:
    def change(graph: Graph) -> None:
        graph.signature = graph.signature.but(**entries)

    return change


CHANGES: dict[str, Callable[[Graph], Any]] = {
    "an attribute's last bit": attribute("epsilon", np.nextafter(0.1, 1)),
    "an attribute more": attribute("beta", 1.0),
    "a constant's last bit": bits,
    "a module": lambda g: node(g, "MatMul").metadata_props.update(module="layers.1"),
    "a mark": lambda g: node(g, "MatMul").meta.update(backward=True),
    "a mark less": lambda g: node(g, "Reshape").meta.pop("backward"),
    "a mark's size": lambda g: node(g, "Reshape").meta.update(sequences=symbol("T")),
    "a type": lambda g: g.inputs[0].meta.update(type=parse_type("f32[B,T,5]")),
    "a size's name": lambda g: g.inputs[0].meta.update(type=parse_type("f32[B,S,4]")),
    "a dtype": lambda g: g.inputs[0].meta.update(type=parse_type("f64[B,T,4]")),
    "a role": lambda g: g.inputs[0].meta.update(role=Role.HYPER),
    "a content": lambda g: g.inputs[3].meta.update(content=(symbol("B"), 4)),
    "a name of an input": lambda g: setattr(g.inputs[0], "name", "batch.y"),
    "an operand": lambda g: node(g, "Neg").replace_input_with(0, g.inputs[0]),
    "an operand less": lambda g: node(g, "LayerNormalization").replace_input_with(1, None),
    "an order of nodes": lambda g: to_the_front(g, "Neg"),
    "an output's name": lambda g: g.output("more", g.outputs["loss"]),
    "an output's value": lambda g: g.outputs.update(loss=g.outputs["w.next"]),
    "what a state replaces": lambda g: g.state.update({"w.next": g.inputs[0]}),
    "a counted size": lambda g: g.counts.discard("S"),
    "the next name": lambda g: g.fresh("x"),
    "the graph's name": lambda g: setattr(g.ir, "name", "other"),
    "a loss": signature(loss="w.next"),
    "no seed": signature(seed=None),
    "a hyperparameter": signature(hyperparameters={Hyperparameter(1, "lr"): "lr"}),
    "a slot": signature(slots={Slot("param.w", "exp_avg_sq"): "param.w"}),
    "a clock": signature(clocks={4: "lr"}),
    "split_halves": signature(split_halves=False),
    "rows": signature(rows={"S": "sizes"}),
}


def test_equal_graphs_give_equal_bytes_and_come_back_whole() -> None:
    graph = small()
    data = to_bytes(graph)
    assert data == to_bytes(small()) == to_bytes(graph.clone())
    again = from_bytes(data)
    assert to_bytes(again) == data
    assert graph_text(again) == graph_text(graph)
    assert again.signature == graph.signature and again.counts == graph.counts
    assert again.fresh("x") == graph.fresh("x")
    assert again.input("lr", parse_type("f64[]"), Role.HYPER).name == "lr#2"
    same = again.constant(np.array([1, 2, 3, 4.5], np.float32))
    assert same in node(again, "LayerNormalization").inputs  # found, not made again


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_shows_in_the_digest(change: str) -> None:
    graph = small()
    before = digest(graph)
    CHANGES[change](graph)
    assert digest(graph) != before
    assert to_bytes(from_bytes(to_bytes(graph))) == to_bytes(graph)


def test_numbers_keep_their_bits() -> None:
    """ONNX has 32 bits for an attribute; a kernel computes with all that the rule has written."""
    graph = Graph()
    x = graph.input("x", parse_type("f32[4]"), Role.BATCH)
    arrays = [
        np.array(v, d)
        for d in ("float32", "float64", "float16", "int64", "bool", "uint8", "int32")
        for v in (0, 1, [], [[1, 0], [0, 1]], [[1, 1], [1, 1]], [1])
    ]
    arrays += [np.array([np.nan, -0.0, np.inf]), np.array([-0.0, 0.0]), np.full((2, 3), -0.0)]
    held = [graph.constant(array) for array in arrays]
    numbers = (0.1, 1 / 3, 1e-300, float("inf"), float("-inf"), -0.0, 2**70 / 3)
    for number in numbers:
        Builder(graph).node("LayerNormalization", [x, x], {"epsilon": number})
    again = from_bytes(to_bytes(graph))
    found = [n.attributes["epsilon"].value for n in again]
    assert [a.hex() for a in found] == [float(n).hex() for n in numbers]
    values = list(again.ir.initializers.values())
    assert len(values) == len({id(v) for v in held})
    for value, array in zip(dict.fromkeys(held), values, strict=True):
        want, have = constant(value), constant(array)
        assert (want.dtype, want.shape, want.tobytes()) == (have.dtype, have.shape, have.tobytes())
        assert have.flags.writeable or have.size == 0


@pytest.mark.parametrize("kind", ["gpt2", "bert", "mlp"])
def test_the_graphs_of_a_step_come_back_as_other_engines_read_them(kind: str) -> None:
    """By the ONNX file of each, which another writer makes."""
    if kind == "mlp":
        x, y = torch.randn(3, 8), torch.tensor([1, 2, 0])
        made = Compiled(tiny.mlp(0.5), (x,), {}, (y,), torch.nn.functional.cross_entropy)
    else:
        made = Compiled(getattr(tiny, kind)(), (), batch(3, 10, "right"))
    packed = made.packed(made.forward.signature.requested((), None))
    step = made.differentiated(trained(made), packed)
    stages = [made.captured.graph, made.forward, step, *([packed] if packed else [])]
    for graph in stages:
        again = from_bytes(to_bytes(graph))
        check(again)
        have = to_proto(again).SerializeToString(deterministic=True)
        assert have == to_proto(graph).SerializeToString(deterministic=True)
        assert digest(again) == digest(graph)
        assert again.signature == graph.signature
        marks = [[dict(n.meta) for n in g] for g in (again, graph)]
        assert marks[0] == marks[1]


def test_what_only_this_process_knows_is_not_written() -> None:
    def settled(graph: Graph) -> None:
        graph.inputs[0].meta["type"] = parse_type("f32[4]").with_shape([symbol("B", at=3)])

    odd: dict[str, Callable[[Graph], Any]] = {
        "a mark": lambda g: node(g, "Neg").meta.update(tensor=object()),
        "a note": lambda g: g.inputs[0].meta.update(owner="x"),
        "a tensor": lambda g: node(g, "Neg").attributes.update(
            t=ir.AttrTensor("t", ir.tensor(np.zeros(2)))
        ),
        "a settled size": settled,
    }
    for what, change in odd.items():
        graph = small()
        change(graph)
        with pytest.raises(ArchiveError):
            print(what, to_bytes(graph))


def test_other_bytes_are_refused_and_nothing_else_happens() -> None:
    data = to_bytes(small())
    for end in range(len(data)):
        with pytest.raises(ArchiveError):
            from_bytes(data[:end])
    with pytest.raises(ArchiveError):
        from_bytes(data + b"x")
    draw = random.Random(0)
    for _ in range(3000):
        broken = bytearray(data)
        for _ in range(draw.choice((1, 1, 2, 8))):
            broken[draw.randrange(len(broken))] = draw.randrange(256)
        try:
            again = from_bytes(bytes(broken))
        except ArchiveError:
            continue
        assert isinstance(again, Graph)  # a letter of a name, say: the file's digest is for that


@pytest.mark.parametrize("shape", [[1 << 25], [1 << 40, 1 << 40], [-1], [2.5], ["4"], [1] * 70])
def test_a_constant_of_one_element_and_a_shape_of_the_files_choice(shape: list[Any]) -> None:
    """The constant would take more memory than the bytes have reason to."""
    head, rest = parts(to_bytes(small()))
    for constant in head["constants"]:
        if constant[4] == 4:
            constant[3] = shape
    with pytest.raises(ArchiveError):
        from_bytes(joined(head, rest))


def test_a_value_without_a_name_is_refused() -> None:
    """The IR would give it a name that another value may have."""
    head, rest = parts(to_bytes(small()))
    head["nodes"][0][7][0][0] = None
    with pytest.raises(ArchiveError, match="without a name"):
        from_bytes(joined(head, rest))


# Lists of an archive's head in which no two items may have one name.
NAMED: dict[str, Callable[[dict[str, Any]], list[Any]]] = {
    "attributes": lambda head: next(n for n in head["nodes"] if n[4])[4],
    "outputs": lambda head: head["outputs"],
    "state": lambda head: head["state"],
    "inputs": lambda head: head["inputs"],
    "constants": lambda head: head["constants"],
    "results": lambda head: next(n for n in head["nodes"] if n[7])[7],
    "slots": lambda head: head["signature"]["slots"]["pairs"],
    "updated": lambda head: head["signature"]["updated"]["pairs"],
}


@pytest.mark.parametrize("where", NAMED)
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_name_that_stands_twice_is_refused(where: str, place: str) -> None:
    """Only one of the two could be kept, and which one is nowhere said."""
    head, rest = parts(to_bytes(small()))
    items = NAMED[where](head)
    items.insert(0 if place == "before" else len(items), items[0])
    with pytest.raises(ArchiveError):
        from_bytes(joined(head, rest))


@pytest.mark.parametrize("key", ["name", "counts", "inputs", "nodes", "outputs", "types", "count"])
@pytest.mark.parametrize("value", [None, [[]], [{}], {1: 1}, [[0, 0, 0, 0, 0]]])
def test_fields_of_other_types_are_refused(key: str, value: Any) -> None:
    head, rest = parts(to_bytes(small()))
    with pytest.raises(ArchiveError) as error:
        again = from_bytes(joined({**head, key: value}, rest))
        to_bytes(again)
    assert str(error.value).isprintable() and len(str(error.value)) <= 400


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def joined(head: dict[str, Any], rest: bytes) -> bytes:
    text = json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + rest
