"""ONNX files that a stranger may have made: tensors beside them, messages, tensors. A row is what
makes the file, and a part of the refusal; some files are legal, though they look alike."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, parser

RNG = np.random.default_rng(0)
W = RNG.standard_normal((4, 4)).astype(np.float32)
B = RNG.standard_normal(4).astype(np.float32)
Model = onnx.ModelProto


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
def linkoutside(folder: Path) -> Model:
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
    "spaces": {"offset": " 0"}, "underscore": {"offset": "0_0"},
    "wide_digits": {"offset": "\uff10"},
    "fraction": {"offset": "0.0"}, "nothing": {"offset": ""},
    "many_digits": {"offset": "9" * 5000},
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
        lambda folder, key=_key: beside(folder, W.tobytes(), "w.bin", **{key: "x"})
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


def outside(model: Model, tensor: TensorProto, folder: Path) -> Model:
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
    return outside(model, model.graph.node[0].attribute[0].t, folder)


@refused("names no file in the model's folder")
def outside_of_a_body(folder: Path) -> Model:
    body = "then_branch: graph = a () => (float[N, 4] p) { p = Exp (x) }"
    body += ", else_branch: graph = b () => (float[N, 4] q) { q = Neg (x) }"
    model = parsed(f"y = If (t) <{body}>", more="<bool t = {1}>")
    graph = next(a.g for a in model.graph.node[0].attribute if a.name == "else_branch")
    return outside(model, graph.initializer.add(name="k"), folder)


@refused("sparse")
def outside_of_a_sparse_tensor(folder: Path) -> Model:
    model = base()
    return outside(model, model.graph.sparse_initializer.add().values, folder)


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
    "nothing": b"", "text": b"<html>not a model</html>", "zeros": bytes(4096),
    "ones": b"\xff" * 999,
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
def bytes_of_a_tensor_that_isoutside(folder: Path) -> bytes:
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
