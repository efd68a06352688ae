"""ONNX files that a stranger may have made: each is refused in one line that names the file, in
bounded time and memory, and nothing outside of its folder is read or written; or it is legal, and
means what onnx says."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import AttributeProto, TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from onward import TrainingSession
from onward.errors import OnwardError

SECONDS = 30.0  # generous: a refusal takes far below one
MEMORY = 400 << 20  # bytes beyond those of the file
RNG = np.random.default_rng(0)
W = RNG.standard_normal((4, 4)).astype(np.float32)
B = RNG.standard_normal(4).astype(np.float32)
Model = onnx.ModelProto
LINUX = sys.platform == "linux"


def parsed(lines: str, opset: int = 21, inputs: str = "float[N, 4] x", more: str = "") -> Model:
    text = f'<ir_version: 10, opset_import: ["" : {opset}]>\n'
    return parser.parse_model(f"{text} m ({inputs}) => (float[N, 4] y) {more} {{ {lines} }}")


def base() -> Model:
    """y = x w + b."""
    model = parsed("m = MatMul (x, w) y = Add (m, b)")
    for name, array in (("w", W), ("b", B)):
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    return model


def beside(folder: Path, data: bytes = W.tobytes(), file: str = "w.bin", **entries: Any) -> Model:
    """`base` with w in a file beside it; entries: others than its place, None for none."""
    if file:
        (folder / file).parent.mkdir(exist_ok=True, parents=True)
        (folder / file).write_bytes(data)
    model = base()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": file, **entries}.items():
        if value is not None:
            tensor.external_data.add(key=key, value=str(value))
    return model


# ---- files beside the model

Make = Callable[[Path], "Model | bytes | None"]
REFUSED: dict[str, tuple[Make, str]] = {}
LEGAL: dict[str, Make] = {}


def refused(said: str, name: str = "") -> Callable[[Make], Make]:
    def decorate(make: Make) -> Make:
        REFUSED[name or make.__name__] = (make, said)
        return make

    return decorate


def legal(make: Make) -> Make:
    LEGAL[make.__name__] = make
    return make


PLACES = {
    "parent": "../outside/canary.bin", "through_a_folder": "sub/../../outside/canary.bin",
    "absolute": "{outside}/canary.bin", "backslashes": "..\\outside\\canary.bin",
    "empty": "", "dots": "..", "here": ".", "folder_slash": "w.bin/", "double_slash": "sub//w.bin",
    "url": "file://{outside}/canary.bin", "nul": "w.bin\0", "nul_inside": "w\0.bin",
    "drive": "C:/w.bin", "drive_alone": "C:w.bin", "device": "/dev/zero", "long": "w" * 5000,
    "newline": "w\n.bin", "unc": "//host/w.bin", "proc": "/proc/self/mem",
    "parent_in_the_middle": "a/../w.bin",
}  # fmt: skip
for _name, _place in PLACES.items():

    def _make(folder: Path, place: str = _place) -> Model:
        (folder / "sub").mkdir()
        location = place.format(outside=folder.parent / "outside")
        return beside(folder, file="w.bin", location=location)

    refused("names no file in the model's folder", f"place_{_name}")(_make)


@refused("cannot be read: No such file")
def place_that_is_not_there(folder: Path) -> Model:
    return beside(folder, location="other.bin")


@refused("cannot be read: No such file")
def place_that_a_home_is(folder: Path) -> Model:
    return beside(folder, location="~/w.bin")


@refused("cannot be read")
def place_below_a_file(folder: Path) -> Model:
    return beside(folder, location="w.bin/w.bin")


@refused("is a link")
def link_outside(folder: Path) -> Model:
    (folder / "l.bin").symlink_to("../outside/canary.bin")
    return beside(folder, location="l.bin")


@refused("is a link")
def link_inside(folder: Path) -> Model:
    (folder / "l.bin").symlink_to("w.bin")
    return beside(folder, location="l.bin")


@refused("is a link")
def link_of_a_folder(folder: Path) -> Model:
    (folder / "l").symlink_to("../outside")
    return beside(folder, location="l/canary.bin")


@refused("is a link")
def link_in_a_circle(folder: Path) -> Model:
    (folder / "l.bin").symlink_to("l.bin")
    return beside(folder, location="l.bin")


@refused("a hard link")
def link_that_is_hard(folder: Path) -> Model:
    os.link(folder.parent / "outside" / "canary.bin", folder / "l.bin")
    return beside(folder, location="l.bin")


@refused("is not a regular file")
def a_pipe(folder: Path) -> Model:
    os.mkfifo(folder / "p.bin")
    return beside(folder, location="p.bin")


@refused("is not a regular file")
def a_folder(folder: Path) -> Model:
    (folder / "d").mkdir()
    return beside(folder, location="d")


@refused("is a link")
def a_device(folder: Path) -> Model:
    (folder / "zero").symlink_to("/dev/zero")
    return beside(folder, location="zero")


@refused("is the model itself")
def the_model_as_its_data(folder: Path) -> Model:
    return beside(folder, location="model.onnx")


for _name, _entries in {
    "negative_offset": {"offset": -1}, "signed_offset": {"offset": "+0"}, "hex": {"offset": "0x0"},
    "spaces": {"offset": " 0"}, "underscore": {"offset": "0_0"}, "wide_digits": {"offset": "\uff10"},
    "fraction": {"offset": "0.0"}, "nothing": {"offset": ""}, "many_digits": {"offset": "9" * 5000},
    "negative_length": {"length": -64}, "no_number": {"length": "all"},
}.items():  # fmt: skip
    refused("which is no number of bytes", f"entry_{_name}")(
        lambda folder, entries=_entries: beside(folder, **entries)
    )
for _name, _entries in {
    "offset_beyond": {"offset": 1},
    "offset_huge": {"offset": 2**59},
    "sum_overflows": {"offset": 2**59, "length": 64},
}.items():
    refused("of a file of 64 bytes", f"entry_{_name}")(
        lambda folder, entries=_entries: beside(folder, **entries)
    )
for _name, _length in {"short": 63, "none": 0, "long": 65, "huge": 2**59}.items():
    refused("its sizes ask for 64", f"length_{_name}")(
        lambda folder, length=_length: beside(folder, length=length)
    )


@refused("of a file of 63 bytes")
def a_file_that_is_cut(folder: Path) -> Model:
    return beside(folder, W.tobytes()[:-1])


for _key in ("__class__", "__dict__", "path", "Location"):
    refused("unknown or second entry", f"key_{_key}")(
        lambda folder, key=_key: beside(folder, **{key: "x"})
    )


@refused("unknown or second entry")
def a_place_that_is_said_twice(folder: Path) -> Model:
    model = beside(folder)
    model.graph.initializer[0].external_data.add(key="location", value="w.bin")
    return model


@refused("a folder of its own choice")
def a_base_folder(folder: Path) -> Model:
    return beside(folder, basepath="../outside")


@refused("names no file in the model's folder")
def no_place_at_all(folder: Path) -> Model:
    return beside(folder, location=None)


@refused("has numbers in two places")
def numbers_beside_and_within(folder: Path) -> Model:
    model = beside(folder)
    model.graph.initializer[0].raw_data = W.tobytes()
    return model


@refused("has numbers in two places")
def a_place_of_a_tensor_that_is_within(folder: Path) -> Model:
    model = beside(folder)
    model.graph.initializer[0].data_location = TensorProto.DEFAULT
    return model


@refused("share the")
def many_tensors_of_one_file(folder: Path) -> Model:
    data = bytes(1 << 20)
    model = beside(folder, data, location=None)
    del model.graph.initializer[0]
    for i in range(2000):
        tensor = model.graph.initializer.add(name=f"w{i}", data_type=1, dims=[1 << 18])
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value="w.bin")
    return model


def _outside(model: Model, tensor: TensorProto, folder: Path) -> Model:
    tensor.CopyFrom(numpy_helper.from_array(W, tensor.name))
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../outside/canary.bin")
    return model


@refused("names no file in the model's folder")
def outside_of_a_constant(folder: Path) -> Model:
    model = base()
    node = helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(W))
    model.graph.node.insert(0, node)
    return _outside(model, model.graph.node[0].attribute[0].t, folder)


@refused("names no file in the model's folder")
def outside_of_a_body(folder: Path) -> Model:
    body = "then_branch: graph = a () => (float[N, 4] p) { p = Exp (x) }"
    body += ", else_branch: graph = b () => (float[N, 4] q) { q = Neg (x) }"
    model = parsed(f"y = If (t) <{body}>", more="<bool t = {1}>")
    graph = next(a.g for a in model.graph.node[0].attribute if a.name == "else_branch")
    return _outside(model, graph.initializer.add(name="k"), folder)


@refused("names no file in the model's folder")
def outside_of_a_function(folder: Path) -> Model:
    model = with_functions("y = own.F (x)", F="y = Neg (x)")
    node = helper.make_node("Constant", [], ["k"], value=numpy_helper.from_array(W))
    model.functions[0].node.insert(0, node)
    return _outside(model, model.functions[0].node[0].attribute[0].t, folder)


@refused("sparse")
def outside_of_a_sparse_tensor(folder: Path) -> Model:
    model = base()
    return _outside(model, model.graph.sparse_initializer.add().values, folder)


@legal
def a_file_beside(folder: Path) -> Model:
    return beside(folder, offset=0, length=64, checksum="x")


@legal
def a_file_below(folder: Path) -> Model:
    return beside(folder, file="sub/deep/w.bin", location="./sub/deep/w.bin")


@legal
def a_part_of_a_file(folder: Path) -> Model:
    return beside(
        folder, b"\xff" * 12 + W.tobytes() + b"\xff" * 5, offset=12, length=64, basepath=""
    )


@legal
def two_tensors_in_one_place(folder: Path) -> Model:
    model = beside(folder)
    model.graph.initializer.add().CopyFrom(model.graph.initializer[0])
    model.graph.initializer[2].name = "w2"
    model.graph.node[1].input[0] = "m2"
    model.graph.node.insert(1, helper.make_node("MatMul", ["m", "w2"], ["m2"]))
    return model


@legal
def a_number_beside(folder: Path) -> Model:
    """A shape, whose numbers have to be known while reading."""
    data = np.array([-1, 4], np.int64).tobytes()
    model = parsed("y = Reshape (x, s)")
    tensor = model.graph.initializer.add(name="s", data_type=7, dims=[2])
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="s.bin")
    (folder / "s.bin").write_bytes(data)
    return model


@legal
def numbers_that_are_none(folder: Path) -> Model:
    model = base()
    w = W.copy()
    w[0, 0] = np.nan
    model.graph.initializer[0].CopyFrom(numpy_helper.from_array(w, "w"))
    return model


# ---- the message


def tagged(number: int, data: bytes) -> bytes:
    """A field of bytes."""
    made, n = bytearray([number << 3 | 2]), len(data)
    while n > 127:
        made.append(n & 127 | 128)
        n >>= 7
    return bytes(made) + bytes([n]) + data


for _name, _data in {
    "nothing": b"", "text": b"<html>not a model</html>", "zeros": bytes(4096), "ones": b"\xff" * 999,
    "pickle": b"\x80\x02cposix\nsystem\nS'x'\ntR.", "cut_varint": b"\x3a\xff", "group": b"\x0b\x0c",
    "long_claim": b"\x3a\xff\xff\xff\xff\x07", "no_field": b"\x02\x00",
    "zip": b"PK\x03\x04" + bytes(99), "lfs": b"version https://git-lfs.github.com/spec/v1\n",
}.items():  # fmt: skip
    refused("", f"bytes_{_name}")(lambda folder, data=_data: data)


def _deep(times: int) -> bytes:
    """A graph in an attribute of a node of a graph, and so on."""
    parts: list[bytes] = []
    data = b""
    for _ in range(times):
        data = tagged(1, tagged(5, tagged(6, data)))
        if len(data) > 1 << 21:
            break
        parts.append(data)
    return tagged(7, data)


@refused("")
def graphs_within_graphs(folder: Path) -> bytes:
    return b"\x08\x0a" + _deep(2000)


@refused("")
def graphs_of_ten_levels(folder: Path) -> bytes:
    return b"\x08\x0a" + _deep(10)


@refused("deeper than 100")
def messages_within_messages(folder: Path) -> bytes:
    """A million levels, each claiming a byte less."""
    total = 1 << 20
    found = bytearray()
    for i in range(total // 8):
        n = total - 8 * (i + 1)
        found += bytes([(7, 1, 5, 6)[0 if not i else 1 + (i - 1) % 3] << 3 | 2])
        found += bytes([n & 127 | 128, n >> 7 & 127 | 128, n >> 14 & 127 | 128, 128, 128, 128, 0])
    return bytes(found)


@refused("no model needs")
def messages_of_two_bytes(folder: Path) -> bytes:
    return tagged(7, tagged(1, b"") * 4_000_000)


@refused("no model needs")
def attributes_of_two_bytes(folder: Path) -> bytes:
    return tagged(7, tagged(1, tagged(5, b"") * 1000) * 4000)


@refused("more than 65536 nodes")
def very_many_nodes(folder: Path) -> bytes:
    node = helper.make_node("Exp", ["x"], [""]).SerializeToString()
    return b"\x08\x0a" + tagged(7, tagged(1, node) * 70_000)


@refused("protobuf ends at 2 GiB")
def a_file_of_a_terabyte(folder: Path) -> None:
    with (folder / "model.onnx").open("wb") as file:
        file.truncate(1 << 40)


@refused("two fields of bytes")
def bytes_of_a_tensor_that_are_said_twice(folder: Path) -> bytes:
    data = base().SerializeToString()
    big = tagged(8, b"k") + tagged(9, bytes(8192)) + tagged(9, bytes(8192))
    return data + tagged(7, tagged(5, big))


@refused("names a file too")
def bytes_of_a_tensor_that_is_outside(folder: Path) -> bytes:
    model = base()
    tensor = model.graph.initializer.add(name="k", data_type=1, dims=[2048], raw_data=bytes(8192))
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../outside/canary.bin")
    return model.SerializeToString()


# ---- tensors


def of_tensor(**fields: Any) -> Make:
    """A model with one more tensor."""

    def make(folder: Path) -> Model:
        model = base()
        tensor = model.graph.initializer.add(name="k", data_type=1)
        for name, value in fields.items():
            if isinstance(value, list):
                getattr(tensor, name).extend(value)
            elif name == "segment":
                tensor.segment.begin = value
            else:
                setattr(tensor, name, value)
        return model

    return make


for _name, _said, _fields in (
    ("negative", "sizes that no tensor has", {"dims": [-1]}),
    ("two_negative", "sizes that no tensor has", {"dims": [-2, -2], "raw_data": bytes(16)}),
    ("huge", "sizes that no tensor has", {"dims": [2**31] * 4}),
    ("overflow", "sizes that no tensor has", {"dims": [2**32, 2**32]}),
    ("zero_and_huge", "sizes that no tensor has", {"dims": [0, 2**62]}),
    ("many", "sizes that no tensor has", {"dims": [1] * 1000, "raw_data": bytes(4)}),
    ("two_to_31", "its sizes ask for 8589934592", {"dims": [2**31]}),
    ("more_bytes", "its sizes ask for 8", {"dims": [2], "raw_data": bytes(12)}),
    ("fewer_bytes", "its sizes ask for 8", {"dims": [2], "raw_data": bytes(7)}),
    ("no_bytes", "its sizes ask for 8", {"dims": [2]}),
    ("more_numbers", "its sizes ask for 2", {"dims": [2], "float_data": [1.0, 2.0, 3.0]}),
    ("other_field", "not in float_data", {"dims": [2], "int64_data": [1, 2]}),
    ("both_fields", "two places", {"dims": [2], "float_data": [1.0, 2.0], "raw_data": bytes(8)}),
    ("no_type", "which has no bytes", {"dims": [2], "data_type": 0, "raw_data": bytes(8)}),
    ("strange_type", "which has no bytes", {"dims": [2], "data_type": 99, "raw_data": bytes(8)}),
    ("negative_type", "which has no bytes", {"dims": [2], "data_type": -1, "raw_data": bytes(8)}),
    ("strings", "not the 2 strings", {"dims": [2], "data_type": 8, "string_data": [b"a"]}),
    ("segment", "is a segment", {"dims": [2], "raw_data": bytes(8), "segment": 1}),
    ("float8", "", {"dims": [3], "data_type": 17, "raw_data": bytes(2)}),
    ("int4", "its sizes ask for 2", {"dims": [3], "data_type": 22, "raw_data": bytes(3)}),
    ("complex", "its sizes ask for 16", {"dims": [2], "data_type": 14, "raw_data": bytes(8)}),
):  # fmt: skip
    refused(_said, f"tensor_{_name}")(of_tensor(**_fields))


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
        "", lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 8)),
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
    _outside(model, info.algorithm.initializer.add(name="k"), folder)
    return model


# ---- the judge

_OPENED: list[str] = []
_watching = False


def _heard(event: str, args: tuple[Any, ...]) -> None:
    if _watching and event == "open" and isinstance(args[0], (str, bytes)):
        _OPENED.append(os.fsdecode(args[0]))


sys.addaudithook(_heard)


@contextmanager
def watched(folder: Path) -> Iterator[None]:
    """Asserts that what runs within opens no file near the folder, and writes none."""
    global _watching
    before = {p: p.lstat().st_mtime_ns for p in folder.parent.rglob("*")}
    _OPENED.clear()
    _watching = True
    try:
        yield
    finally:
        _watching = False
    near = [p for p in _OPENED if p.startswith(str(folder.parent)) or p.startswith(("/dev", ".."))]
    assert all(Path(os.path.normpath(p)).is_relative_to(folder) for p in near), near
    assert {p: p.lstat().st_mtime_ns for p in folder.parent.rglob("*")} == before


def written(tmp_path: Path, make: Make) -> tuple[Path, int]:
    """The path of a model in a folder with a canary beside it, and the size of its file."""
    folder, outside = tmp_path / "model", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "canary.bin").write_bytes(W.tobytes())
    made = make(folder)
    path = folder / "model.onnx"
    if made is not None:
        path.write_bytes(made if isinstance(made, bytes) else made.SerializeToString())
    return path, path.stat().st_size


def peak(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    return 0


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", REFUSED)
def test_each_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    make, said = REFUSED[name]
    path, size = written(tmp_path, make)
    if LINUX:
        Path("/proc/self/clear_refs").write_text("5")
    before, start = peak("VmRSS") if LINUX else 0, time.process_time()
    with watched(path.parent), pytest.raises(OnwardError) as caught:
        TrainingSession(path)
    assert time.process_time() - start < SECONDS
    if LINUX:
        assert peak("VmHWM") - before < MEMORY + 3 * min(size, 1 << 30)
    text = str(caught.value)
    assert text.isprintable() and len(text) <= 500 and str(path) in text, text
    assert said in text, text
    for word in ("KeyError", "RecursionError", "MemoryError", "struct.error", "Traceback"):
        assert word not in text


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LEGAL)
def test_what_is_legal_means_what_onnx_says(name: str, tmp_path: Path) -> None:
    path, _ = written(tmp_path, LEGAL[name])
    with watched(path.parent):
        session = TrainingSession(path)
    x = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    expected: Any = ReferenceEvaluator(onnx.load(path)).run(["y"], {"x": x})[0]  # type: ignore[index]
    found = session.predict({"x": x})["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_the_same_is_refused_of_a_message_in_memory() -> None:
    """It has no folder, so that nothing outside of it can be read."""
    model = base()
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="w.bin")
    with pytest.raises(OnwardError, match=r"lie in another file; fix: give the path"):
        TrainingSession(model)
    for name in ("graph_future_ir", "graph_made_twice", "tensor_huge"):
        make, said = REFUSED[name]
        made = make(Path())
        with pytest.raises(OnwardError) as caught:
            TrainingSession(made)
        assert said in str(caught.value)


def test_links_that_a_user_names_are_followed(tmp_path: Path) -> None:
    path, _ = written(tmp_path, a_file_beside)
    (tmp_path / "linked").symlink_to(path.parent)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "m.onnx").symlink_to(path)
    TrainingSession(tmp_path / "linked" / "model.onnx")
    with pytest.raises(OnwardError, match="cannot be read: No such file"):
        TrainingSession(tmp_path / "alone" / "m.onnx")  # its data would lie beside the link
