"""ONNX files that a stranger may have made: graphs, attributes, sizes that they ask for, functions.
Further rows of the table of `hostile_onnx_files`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from hostile_onnx_files import Make, Model, W, base, legal, outside, parsed, refused
from onnx import AttributeProto, helper, numpy_helper, parser

# ---- graphs


def edited(edit: Callable[[Model], object]) -> Make:
    def make(folder: Path) -> Model:
        model = base()
        edit(model)
        return model

    return make


def _node(op: str, inputs: list[str], outputs: list[str], **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, inputs, outputs, **attributes)


def _attribute(**fields: Any) -> Callable[[Model], object]:
    """Gives the Add an attribute of its own."""

    def edit(model: Model) -> None:
        made = AttributeProto(name=fields.pop("name", "axis"))
        for name, value in fields.items():
            setattr(made, name, value)
        model.graph.node[1].op_type = "Concat"
        model.graph.node[1].attribute.append(made)

    return edit


def _swapped(model: Model) -> None:
    nodes = [*model.graph.node][::-1]
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _opset(*items: tuple[str, int]) -> Callable[[Model], object]:
    def edit(model: Model) -> None:
        del model.opset_import[:]
        model.opset_import.extend(helper.make_opsetid(d, v) for d, v in items)

    return edit


EDITS: dict[str, tuple[str, Callable[[Model], object]]] = {
    "no_graph": ("has no graph", lambda m: m.ClearField("graph")),
    "no_ir": ("IR version", lambda m: m.ClearField("ir_version")),
    "negative_ir": ("IR version", lambda m: setattr(m, "ir_version", -1)),
    "future_ir": ("IR version", lambda m: setattr(m, "ir_version", 10**6)),
    "no_opset": ("no opset of standard ONNX", _opset()),
    "other_opset": ("no opset of standard ONNX", _opset(("own", 1))),
    "opset_twice": ("twice", _opset(("", 21), ("", 21))),
    "opset_of_two_names": ("twice", _opset(("", 21), ("ai.onnx", 20))),
    "opset_0": ("imports opset 0", _opset(("", 0))),
    "opset_negative": ("imports opset -5", _opset(("", -5))),
    "opset_future": ("imports opset 99", _opset(("", 99))),
    "own_opset_negative": ("imports opset -1", _opset(("", 21), ("own", -1))),
    "opset_1": ("", _opset(("", 1))),
    "domain": (
        "domain own", lambda m: [_opset(("", 21), ("own", 1))(m),
                                 setattr(m.graph.node[0], "domain", "own")],
    ),
    "unknown_op": ("no such op", lambda m: setattr(m.graph.node[0], "op_type", "Planted")),
    "empty_op": ("no such op", lambda m: setattr(m.graph.node[0], "op_type", "")),
    "cycle": ("no node produces its input y", lambda m: m.graph.node[0].input.__setitem__(0, "y")),
    "self": ("no node produces its input m", lambda m: m.graph.node[0].input.__setitem__(0, "m")),
    "order": ("no node produces its input m", _swapped),
    "undefined": (
        "no node produces its input z", lambda m: m.graph.node[0].input.__setitem__(0, "z")),
    "no_output": (
        "no node produces the output z", lambda m: setattr(m.graph.output[0], "name", "z")),
    "made_twice": (
        "makes 'm' twice", lambda m: m.graph.node.insert(1, _node("Exp", ["m"], ["m"]))),
    "makes_its_input": (
        "makes 'x' twice", lambda m: m.graph.node.append(_node("Exp", ["m"], ["x"]))),
    "makes_a_weight": (
        "makes 'w' twice", lambda m: m.graph.node.append(_node("Exp", ["m"], ["w"]))),
    "outputs_of_one_name": (
        "makes 'p' twice",
        lambda m: m.graph.node.append(_node("Split", ["m"], ["p", "p"], axis=1, num_outputs=2))),
    "inputs_twice": (
        "of one name or none", lambda m: m.graph.input.append(m.graph.input[0])),
    "initializers_twice": (
        "of one name or none", lambda m: m.graph.initializer.append(m.graph.initializer[0])),
    "listed_twice": (
        "of one name or none", lambda m: m.graph.output.append(m.graph.output[0])),
    "nameless_initializer": (
        "of one name or none", lambda m: setattr(m.graph.initializer[0], "name", "")),
    "attribute_twice": (
        "has an attribute twice",
        lambda m: [_attribute(type=2, i=1)(m), _attribute(type=2, i=0)(m)]),
    "attribute_of_no_kind": ("of no kind", _attribute(i=1)),
    "attribute_of_another_kind": ("of no kind", _attribute(type=2, f=1.0)),
    "attribute_of_two_kinds": ("of no kind", _attribute(type=2, i=1, f=1.0)),
    "attribute_of_the_wrong_kind": ("of another kind than the op's", _attribute(type=1, f=1.0)),
    "attribute_of_text": ("of another kind than the op's", _attribute(type=3, s=b"1")),
    "attribute_graph_lacking": ("of no kind", _attribute(type=5)),
    "attribute_reference": ("", _attribute(type=2, ref_attr_name="axis")),
    "attribute_unknown": ("", _attribute(name="planted", type=2, i=1)),
    "loop_for_ever": (
        "more than 1024 iterations", lambda m: _loop(m, 2**62)),
    "split_of_none": (
        "", lambda m: m.graph.node.append(_node("Split", ["m"], [], axis=1, num_outputs=0))),
    "blocks_of_none": (
        "", lambda m: m.graph.node.insert(1, _node("DepthToSpace", ["m"], ["q"], blocksize=0))),
    "an_input_that_is_none": (
        "is a sequence_type, not a tensor",
        lambda m: m.graph.input[0].type.CopyFrom(
            helper.make_sequence_type_proto(helper.make_tensor_type_proto(1, [1])))),
    "an_input_of_text": (
        "is of string", lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 8)),
    "an_input_of_undefined": (
        "is of undefined", lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 0),
    ),
    "pooled_over_no_dims": (
        "has no dims to pool over",
        lambda m: m.graph.node.append(_node("GlobalAveragePool", ["m"], ["q"])),
    ),
    "an_input_of_no_type": (
        "", lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 99)),
    "an_input_without_type": ("not a tensor", lambda m: m.graph.input[0].ClearField("type")),
}  # fmt: skip


def _loop(model: Model, times: int) -> None:
    body = parser.parse_graph(
        "b (int64 i, bool c, float[N, 4] v) => (bool d, float[N, 4] u) "
        "{ d = Identity (c) u = Mul (v, v) }"
    )
    for name, array in (("n", np.array(times)), ("go", np.array(True))):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    model.graph.node[1].output[0] = "s"
    model.graph.node.append(_node("Loop", ["n", "go", "s"], ["y"], body=body))


for _name, (_said, _edit) in EDITS.items():
    refused(_said, f"graph_{_name}")(edited(_edit))

# Sizes that a file asks for; each makes q of constants.
SIZES = {
    "constant_of_shape": "q = ConstantOfShape (two)", "expand": "q = Expand (one, two)",
    "tile": "q = Tile (square, two)", "range": "q = Range (zero, huge, step)",
    "range_of_floats": "q = Range (f0, f1, f2)", "one_hot": "q = OneHot (at, huge, pair)",
    "pad": "q = Pad (square, four)", "eye": "r = ConstantOfShape (two) q = EyeLike (r)",
    "window": "q = HannWindow (huge)", "resize": "q = Resize (image, none, none, sizes)",
    "products": "r = ConstantOfShape (row) s = ConstantOfShape (column) q = Mul (r, s)",
    "mel": "q = MelWeightMatrix (huge, huge, huge, f1, f1)",
}  # fmt: skip
HELD: dict[str, Any] = {
    "two": np.array([10**9, 10**9]), "one": np.ones(1, np.float32), "zero": np.array(0),
    "square": np.ones((1, 1), np.float32), "huge": np.array(10**14), "step": np.array(1),
    "f0": np.array(0, np.float32), "f1": np.array(1e18, np.float32),
    "f2": np.array(1e-9, np.float32), "at": np.array([1]), "pair": np.ones(2, np.float32),
    "four": np.array([0, 0, 10**9, 10**9]), "image": np.ones((1, 1, 2, 2), np.float32),
    "none": np.zeros(0, np.float32), "sizes": np.array([1, 1, 10**8, 10**8]),
    "row": np.array([10**8, 1]), "column": np.array([1, 10**8]),
}  # fmt: skip
for _name, _lines in SIZES.items():

    def _sized(folder: Path, lines: str = _lines) -> Model:
        model = parsed(f"{lines} r9 = ReduceSum (q) y = Add (x, r9)")
        for name, array in HELD.items():
            model.graph.initializer.append(numpy_helper.from_array(array, name))
        return model

    refused("", f"size_{_name}")(_sized)


@refused("cannot unroll")
def loops_within_loops(folder: Path) -> Model:
    model = base()
    _loop(model, 1000)
    outer = base()
    _loop(outer, 1000)
    inner = outer.graph.node[-1].attribute[0].g
    inner.node[1].CopyFrom(model.graph.node[-1])
    inner.node[1].input[2], inner.node[1].output[0] = "v", "u"
    return outer


@refused("cannot read more than 65536 nodes")
def a_long_body_very_often(folder: Path) -> Model:
    model = base()
    _loop(model, 1000)
    body = model.graph.node[-1].attribute[0].g
    last = body.node.pop()
    for i in range(1000):
        body.node.append(_node("Identity", ["v" if not i else f"i{i - 1}"], [f"i{i}"]))
    body.node.append(_node("Mul", ["i999", last.input[0]], ["u"]))
    return model


@refused("terms")
def sizes_of_very_many_terms(folder: Path) -> Model:
    """Sums of sizes, multiplied again and again."""
    inputs = ", ".join(f"float[N{i}, 4] x{i}" for i in range(40))
    every = ", ".join(f"x{i}" for i in range(40))
    lines = f"c = Concat <axis = 0> ({every}) r0 = ReduceSum (c, one) "
    lines += "t0 = Transpose <perm = [1, 0]> (c) p0 = MatMul (c, t0) "
    for i in range(8):
        lines += f"q{i} = Reshape (p{i}, flat) u{i} = Unsqueeze (q{i}, ones) "
        lines += f"v{i} = Transpose <perm = [1, 0]> (u{i}) p{i + 1} = Mul (u{i}, v{i}) "
    model = parsed(f"{lines} y = Identity (p8)", inputs=inputs)
    for name, array in (("one", [1]), ("flat", [-1]), ("ones", [1])):
        model.graph.initializer.append(numpy_helper.from_array(np.array(array), name))
    return model


# ---- functions


def with_functions(lines: str, **bodies: str) -> Model:
    model = parsed(lines.replace("own.", "")) if "own." not in lines else None
    text = '<ir_version: 10, opset_import: ["" : 21, "own" : 1]>\n'
    text += f"m (float[N, 4] x) => (float[N, 4] y) {{ {lines} }}\n"
    for name, body in bodies.items():
        text += (
            f'<domain: "own", opset_import: ["" : 21, "own" : 1]> {name} (x) => (y) {{ {body} }}\n'
        )
    assert model is None
    return parser.parse_model(text)


@refused("calls itself")
def a_function_that_calls_itself(folder: Path) -> Model:
    return with_functions("y = own.F (x)", F="y = own.F (x)")


@refused("calls itself")
def functions_that_call_each_other(folder: Path) -> Model:
    return with_functions("y = own.F (x)", F="y = own.G (x)", G="y = own.H (x)", H="y = own.F (x)")


@refused("calls itself")
def a_function_that_calls_itself_in_a_body(folder: Path) -> Model:
    """Where onnx's own inliner does not look before it follows."""
    branches = "then_branch: graph = a () => (p) { p = own.F (x) }"
    branches += ", else_branch: graph = b () => (q) { q = Neg (x) }"
    return with_functions(
        "y = own.F (x)", F=f"t = Constant <value_int = 1> () y = If (t) <{branches}>"
    )


@refused("come to more than")
def functions_that_call_the_next_twice(folder: Path) -> Model:
    bodies = {f"F{i}": f"a = own.F{i + 1} (x) y = own.F{i + 1} (a)" for i in range(40)}
    return with_functions("y = own.F0 (x)", **bodies, F40="y = Exp (x)")


@refused("deep")
def functions_of_very_many_levels(folder: Path) -> Model:
    bodies = {f"F{i}": f"y = own.F{i + 1} (x)" for i in range(3000)}
    return with_functions("y = own.F0 (x)", **bodies, F3000="y = Exp (x)")


@refused("is defined twice")
def functions_of_one_name(folder: Path) -> Model:
    model = with_functions("y = own.F (x)", F="y = Exp (x)")
    model.functions.append(model.functions[0])
    return model


@refused("")
def a_function_with_fewer_inputs(folder: Path) -> Model:
    model = with_functions("y = own.F (x)", F="y = Exp (x)")
    model.graph.node[0].input.extend(["x", "x"])
    return model


@legal
def functions_that_call_others(folder: Path) -> Model:
    return with_functions(
        "a = own.F (x) y = own.F (a)", G="y = Exp (x)", F="a = own.G (x) y = Neg (a)"
    )


@legal
def a_weight_that_nothing_reads(folder: Path) -> Model:
    model = base()
    model.graph.initializer.append(numpy_helper.from_array(np.ones((3, 3), np.float32), "k"))
    return model


@legal
def an_input_that_is_a_weight(folder: Path) -> Model:
    model = base()
    model.graph.input.append(helper.make_tensor_value_info("w", 1, [4, 4]))
    return model


@legal
def an_output_that_is_the_input(folder: Path) -> Model:
    model = base()
    model.graph.output.append(model.graph.input[0])
    return model


@legal
def very_long_texts(folder: Path) -> Model:
    model = base()
    model.metadata_props.add(key="k" * 10_000, value="v" * 5_000_000)
    model.model_version, model.doc_string = 2**62, "d" * 1_000_000
    model.graph.node[0].name = "n" * 100_000
    return model


@legal
def a_long_chain(folder: Path) -> Model:
    model = base()
    model.graph.node[1].output[0] = "z0"
    for i in range(3000):
        model.graph.node.append(_node("Identity", [f"z{i}"], [f"z{i + 1}"]))
    model.graph.node.append(_node("Exp", ["z3000"], ["y"]))
    return model


@legal
def information_of_training(folder: Path) -> Model:
    model = base()
    info = model.training_info.add()
    outside(model, info.algorithm.initializer.add(name="k"), folder)
    return model


@refused("names no file in the model's folder")
def outside_of_a_function(folder: Path) -> Model:
    model = with_functions("y = own.F (x)", F="y = Neg (x)")
    node = helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(W))
    model.functions[0].node.insert(0, node)
    return outside(model, model.functions[0].node[0].attribute[0].t, folder)
