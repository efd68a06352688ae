"""Graphs that a stranger may have made: archives of graphs and captures, and ONNX models."""

from __future__ import annotations

import functools
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from fuzz.files.json_trees import changed_text
from fuzz.files.judge import Format
from fuzz.files.tensor_files import flipped
from fuzz.files.wire import changed_message
from onnx import parser
from onnx.reference import ReferenceEvaluator

from onward.capture import CapturedModule, CaptureRequest, capture
from onward.capture.archive import captured as captures
from onward.graph.archive import ArchiveError, from_bytes, to_bytes
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, type_of
from onward.graph.importer import from_onnx
from onward.model_state import Reads

GRAPH, CAPTURE, MODEL = "step.graph", "capture.graph", "model.onnx"
LURES: tuple[Any, ...] = (
    "planted", "PARAM", "HYPER", "Region", "RegionGrad", "If", "Loop", "onward", "",
    "FLOAT", "STRING",
    "UNDEFINED", "GRAPH", "TENSOR", [[["B"], 1]], [[["B"], 0]], [[[], 4]], [[["B", "B"], 2**70]],
    "container", "fields", "dataclass", "subprocess", "Popen", "os", "system", "L['leaves'][0]",
    "__import__('os').system('x') == 0", "L['leaves'][0].size()[0] == 2", "9 ** 9 == 1",
    "view.default",
    "load.default", {"node": 99}, {"node": -1}, {"dtype": "torch.load"}, {"device": "planted"},
    "transformers.modeling_outputs", "CausalLMOutputWithPast", "tuple", "computed", "held", "given",
)  # fmt: skip


def _parts(data: bytes) -> tuple[bytes, bytes]:
    length = int.from_bytes(data[:8], "little")
    return data[8 : 8 + length], data[8 + length :]


def _joined(text: bytes, rest: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text + rest


def change_archive(data: bytes, draw: random.Random) -> bytes:
    """Bytes of an archive with another head, other constants, or other bytes."""
    kind = draw.random()
    if kind < 0.15:
        return flipped(data, draw)
    text, rest = _parts(data)
    if kind < 0.25:
        return _joined(text, flipped(rest, draw))
    if kind < 0.3:
        claimed = draw.choice([0, 2**63, len(text) - 1, len(text) + 1, 2**64 - 1, len(data)])
        return claimed.to_bytes(8, "little") + text + rest
    return _joined(changed_text(text, draw, LURES), rest)


# ---- graphs


@functools.cache
def _graph() -> bytes:
    import tiny
    from tiny import Compiled

    torch.manual_seed(0)
    x, y = torch.randn(3, 8), torch.tensor([1, 2, 0])
    made = Compiled(tiny.mlp(0.5), (x,), {}, (y,), torch.nn.functional.cross_entropy)
    return to_bytes(made.differentiated(tiny.trained(made), None))


def make_graph(folder: Path) -> None:
    (folder / GRAPH).write_bytes(_graph())


def change_graph(folder: Path, draw: random.Random, outside: Path) -> str:
    path = folder / GRAPH
    path.write_bytes(change_archive(path.read_bytes(), draw))
    return "changed archive"


def load_graph(folder: Path) -> Graph:
    return from_bytes((folder / GRAPH).read_bytes())


def check_graph(folder: Path, found: Graph) -> str | None:
    """Written again, a graph says what the file says, key for key."""
    try:
        again = to_bytes(found)
    except Exception as error:
        return f"a graph is loaded that cannot be written: {type(error).__name__}: {error}"[:150]
    text, _ = _parts((folder / GRAPH).read_bytes())
    said, have = _resolved(json.loads(text)), _resolved(json.loads(_parts(again)[0]))
    for key, value in have.items():
        if _loose(value) != _loose(said.get(key)):
            return f"another {key}"
    return None


def _resolved(head: dict[str, Any]) -> dict[str, Any]:
    """The head of an archive with types in the place of their numbers."""
    types = head.pop("types")
    values = [*head["inputs"], *head["constants"], *(v for n in head["nodes"] for v in n[7])]
    for value in values:
        value[1] = types[value[1]]
    head["counts"] = sorted(set(head["counts"]))
    return head


def _loose(value: Any) -> Any:
    """JSON as text, numbers and truth by value."""
    if isinstance(value, list):
        return [_loose(x) for x in value]
    if isinstance(value, dict):
        return {k: _loose(v) for k, v in value.items()} or []  # empty is empty
    whole = isinstance(value, bool | float) and math.isfinite(value) and value == int(value)
    return str(int(value) if whole else value)


# ---- captures


@functools.cache
def _captured() -> tuple[torch.nn.Module, bytes]:
    import tiny

    model = tiny.gpt2(layers=1, width=8)
    batch = tiny.batch(2, 8, "right")
    request = CaptureRequest(model, (), batch)
    return model, captures.written(capture(request), _live(model))


def _live(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = dict(model.named_buffers(remove_duplicate=False))
    return {**dict(model.named_parameters(remove_duplicate=False)), **named}


def make_capture(folder: Path) -> None:
    (folder / CAPTURE).write_bytes(_captured()[1])


def change_capture(folder: Path, draw: random.Random, outside: Path) -> str:
    path = folder / CAPTURE
    data = path.read_bytes()
    if draw.random() < 0.4:
        text, rest = _parts(data)
        path.write_bytes(_joined(text, change_archive(rest, draw)))
        return "changed graph of a capture"
    path.write_bytes(change_archive(data, draw))
    return "changed capture"


def load_capture(folder: Path) -> CapturedModule:
    model, _ = _captured()
    return captures.read((folder / CAPTURE).read_bytes(), _live(model), Reads([]))


def check_capture(folder: Path, found: CapturedModule) -> str | None:
    """Says what is wrong where a capture has other tensors than the model's that its file names."""
    model, _ = _captured()
    live = _live(model)
    said = json.loads(_parts((folder / CAPTURE).read_bytes())[0])
    for key, held in (("parameters", found.parameters), ("buffers", found.buffers)):
        for name, path in dict(said[key]).items():
            if held[name] is not live[path]:
                return f"another tensor as {name}"
    return None


# ---- ONNX models

MODELS = (
    """<ir_version: 10, opset_import: ["" : 20, "own" : 1]>
model (float[B, 4] x, float[4] w) => (float[B, 4] y) {
    h = own.Scaled <times: float = 2.5> (x, w)
    y = own.Twice (h)
}
<domain: "own", opset_import: ["" : 20, "own" : 1]>
Scaled <times: float> (x, w) => (y) {
    t = Constant <value_float: float = @times> ()
    z = Mul (x, w)
    y = Mul (z, t)
}
<domain: "own", opset_import: ["" : 20]>
Twice (x) => (y) { y = Add (x, x) }
""",
    """<ir_version: 10, opset_import: ["" : 20]>
model (float[3, 4] x) => (float[3, 4] y)
<float[4, 4] k = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}, float[4] s = {1,2,3,4},
int64[2] n = {3,4}> {
    a = MatMul (x, k)
    b = LayerNormalization <axis = -1, epsilon = 0.001> (a, s)
    c = Reshape (b, n)
    d = Softmax <axis = 1> (c)
    e = Concat <axis = 0> (d, x)
    f, g = Split <axis = 0, num_outputs = 2> (e)
    h = Gelu (f)
    i = Where (m, h, g)
    m = Greater (f, g)
    y = Add (h, g)
}
""",
    """<ir_version: 10, opset_import: ["" : 20]>
model (float[3, 4] x, bool go) => (float[3, 4] y) <int64 n = {3}, bool t = {1}> {
    z = If (go) <
        then_branch: graph = yes () => (float[3, 4] a) { a = Exp (x) },
        else_branch: graph = no () => (float[3, 4] a) { a = Neg (x) }
    >
    y = Loop (n, t, z) <
        body: graph = turn (int64 i, bool c, float[3, 4] v) => (bool d, float[3, 4] w) {
            d = Identity (c)
            w = Mul (v, v)
        }
    >
}
""",
)  # fmt: skip


@functools.cache
def _models() -> tuple[bytes, ...]:
    texts = [
        text.replace("    i = Where (m, h, g)\n    m = Greater (f, g)\n", "") for text in MODELS
    ]
    return tuple(parser.parse_model(text).SerializeToString() for text in texts)


def make_onnx(folder: Path) -> None:
    (folder / MODEL).write_bytes(_models()[0])


def change_onnx(folder: Path, draw: random.Random, outside: Path) -> str:
    data = draw.choice(_models())
    if draw.random() < 0.1:
        data = flipped(data, draw)
        said = "other bytes"
    elif draw.random() < 0.15:
        model = onnx.load_from_string(data)
        said = _other_model(model, draw, outside)
        data = model.SerializeToString()
    else:
        data, said = changed_message(data, draw), "other fields"
    (folder / MODEL).write_bytes(data)
    return said


def _other_model(model: onnx.ModelProto, draw: random.Random, outside: Path) -> str:
    """Changes that fields alone hardly make: tensors in other files, functions that call
    themselves, sizes that are huge."""
    kind = draw.choice(["outside", "cycle", "sizes", "constant", "self", "range"])
    if kind == "outside":
        tensor = model.graph.initializer.add(name="k2", data_type=1, dims=[4])
        tensor.data_location = onnx.TensorProto.EXTERNAL
        names = [f"../{outside.name}/x.data", str(outside / "x.data"), "model.onnx", "x.data"]
        tensor.external_data.add(key="location", value=draw.choice(names))
        model.graph.node.add(op_type="Mul", input=[model.graph.input[0].name, "k2"], output=["q"])
    elif kind == "cycle":
        model.opset_import.add(domain="own", version=1)
        for name, other in (("A", "B"), ("B", draw.choice(["A", "B"]))):
            made = model.functions.add(name=name, domain="own", input=["x"], output=["y"])
            made.opset_import.add(domain="", version=20)
            made.opset_import.add(domain="own", version=1)
            made.node.add(op_type=other, domain="own", input=["x"], output=["y"])
        model.graph.node.insert(
            0, onnx.NodeProto(op_type="A", domain="own", input=["x"], output=["q"])
        )
        if draw.random() < 0.5:
            model.graph.output[0].name = "q"
    elif kind == "sizes":
        n = draw.choice([10**5, 10**9, 2**62, -1])
        sizes = onnx.numpy_helper.from_array(np.array([n, n], np.int64), "sizes")
        model.graph.initializer.append(sizes)
        op = draw.choice(["Expand", "ConstantOfShape", "Tile"])
        inputs = {"Expand": ["s1", "sizes"], "ConstantOfShape": ["sizes"], "Tile": ["s2", "sizes"]}
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(1, np.float32), "s1"))
        ones = onnx.numpy_helper.from_array(np.ones((1, 1), np.float32), "s2")
        model.graph.initializer.append(ones)
        model.graph.node.add(op_type=op, input=inputs[op], output=["q"])
        model.graph.node.add(op_type="ReduceSum", input=["q"], output=["r"])
    elif kind == "constant":
        tensor = onnx.TensorProto(data_type=draw.choice([1, 7, 8, 0, 16, 99]), dims=[10**9, 10**9])
        model.graph.node.add(op_type="Constant", output=["q"]).attribute.add(
            name="value", type=onnx.AttributeProto.TENSOR, t=tensor
        )
    elif kind == "range":
        for name, n in (("b0", 0), ("b1", 10 ** draw.choice([8, 12])), ("b2", draw.choice([0, 1]))):
            held = onnx.numpy_helper.from_array(np.array(n, np.int64), name)
            model.graph.initializer.append(held)
        model.graph.node.add(op_type="Range", input=["b0", "b1", "b2"], output=["q"])
    else:
        output = model.graph.output[0].name
        model.graph.node.add(op_type="Add", input=[output, output], output=[output])
    return kind


def load_onnx(folder: Path) -> Graph:
    """The graph of a model that onnx itself can parse; else None, which says nothing."""
    try:
        model = onnx.load_from_string((folder / MODEL).read_bytes())
    except Exception as error:
        raise ValueError(f"onnx does not parse it: {type(error).__name__}") from error
    return from_onnx(model)


def check_onnx(folder: Path, found: Graph) -> str | None:
    """Says what is wrong where a graph computes another result than onnx's reference evaluator."""
    model = onnx.load_from_string((folder / MODEL).read_bytes())
    try:
        onnx.checker.check_model(model)
    except Exception:
        return None  # onnx refuses it: there is no right meaning
    draw = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for value in found.inputs:
        type = type_of(value)
        shape = [n if isinstance(n, int) else 3 for n in type.shape]
        if len(shape) > 4 or any(not 0 <= n < 100 for n in shape):
            return None
        feeds[str(value.name)] = np.asarray(draw.random(shape)).astype(type.dtype.numpy())
    try:
        want: Any = ReferenceEvaluator(model).run(None, feeds)
    except Exception:
        return None
    have = evaluate(found, feeds)
    for info, y in zip(model.graph.output, want, strict=True):
        x = np.asarray(have[info.name])
        if x.shape != np.shape(y) or not np.allclose(x, y, 1e-4, 1e-5, equal_nan=True):
            return "another result"
    return None


FORMATS: dict[str, Format] = {
    "graph": Format(make_graph, change_graph, load_graph, check_graph, (ArchiveError,), False),
    "capture": Format(
        make_capture, change_capture, load_capture, check_capture, (ArchiveError,), False
    ),
    "onnx": Format(make_onnx, change_onnx, load_onnx, check_onnx, (ValueError,), False),
}  # fmt: skip
