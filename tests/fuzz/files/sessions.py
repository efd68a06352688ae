"""ONNX files that a stranger may have made, with tensors beside them, as a training session opens
them: fields, places, tensors, attributes, nodes and functions are changed."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from fuzz.files.graphs import MODELS
from fuzz.files.judge import Format
from fuzz.files.places import changed_place, lures_of
from fuzz.files.tensor_files import flipped
from fuzz.files.wire import changed_message
from onnx import TensorProto, helper, numpy_helper, parser
from onnx.reference import ReferenceEvaluator

from onward import TrainingSession
from onward.errors import OnwardError
from onward.graph.evaluate import evaluate
from onward.graph.graph import type_of
from onward.graph.names import parameter_name

MODEL, DATA = "model.onnx", "w.bin"
HUGE = (0, 1, -1, 2, 3, 5, 7, 100, 10**4, 10**6, 10**9, 2**31, 2**32, 2**62, -(2**31), -(2**63))
FLOATS = (0.0, -1.0, 1e-9, 1e9, 1e30, -1e30, float("inf"), float("nan"), 0.5, 3.0)
MOST = 10**5  # numbers of a value that is computed for comparison

WORDS = """<ir_version: 10, opset_import: ["" : 17]>
words (int64[B, T] ids) => (float[B, T, 8] y) {
    e = Gather (table, ids)
    n = LayerNormalization <axis = -1, epsilon = 0.001> (e, scale, bias)
    s = Shape (n)
    s0 = Gather <axis = 0> (s, zero)
    u0 = Unsqueeze (s0, axes)
    shape = Concat <axis = 0> (u0, rest)
    r = Reshape (n, shape)
    q = MatMul (r, up)
    g, h = Split <axis = -1> (q, halves)
    f = Sigmoid (g)
    m = Mul (f, h)
    k = Transpose <perm = [0, 2, 1]> (m)
    a = MatMul (m, k)
    p = Softmax <axis = -1> (a)
    v = MatMul (p, m)
    y = Add (v, n)
}
"""
IMAGES = """<ir_version: 8, opset_import: ["" : 13]>
images (float[B, 3, 8, 8] x) => (float[B, 4] y) {
    c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1], strides = [1, 1]> (x, w, b)
    l = Clip (c, low, high)
    u = Resize <mode = "nearest"> (l, roi, scales)
    d = Pad <mode = "reflect"> (u, pads)
    m = MaxPool <kernel_shape = [2, 2], strides = [2, 2]> (d)
    p = GlobalAveragePool (m)
    f = Flatten (p)
    y = Gemm <transB = 1> (f, head)
}
"""
ARRAYS: dict[str, dict[str, Any]] = {
    WORDS: {
        "table": (11, 8), "scale": (8,), "bias": (8,), "up": (8, 16), "zero": np.array(0),
        "axes": np.array([0]), "rest": np.array([-1, 8]), "halves": np.array([8, 8]),
    },
    IMAGES: {
        "w": (4, 3, 3, 3), "b": (4,), "low": np.array(-9, np.float32), "roi": np.zeros(0, "f4"),
        "high": np.array(9, np.float32), "scales": np.array([1, 1, 2, 2], np.float32),
        "pads": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "head": (4, 4),
    },
}  # fmt: skip


@functools.cache
def _models() -> tuple[bytes, ...]:
    found: list[onnx.ModelProto] = []
    for text, arrays in ARRAYS.items():
        model, draw = parser.parse_model(text), np.random.default_rng(0)
        for name, given in arrays.items():
            is_shape = isinstance(given, tuple)
            array = draw.standard_normal(given).astype(np.float32) if is_shape else given
            model.graph.initializer.append(numpy_helper.from_array(array, name))
        found.append(model)
    old = onnx.ModelProto()
    old.CopyFrom(found[1])
    old.opset_import[0].version = 11
    texts = [
        text.replace("    i = Where (m, h, g)\n    m = Greater (f, g)\n", "") for text in MODELS
    ]
    found += [*(parser.parse_model(text) for text in texts), old]
    return tuple(model.SerializeToString() for model in found)


@functools.cache
def _known() -> frozenset[str]:
    """The ops of the models that are changed."""
    nodes = [n for data in _models() for n in onnx.load_from_string(data).graph.node]
    return frozenset(node.op_type for node in nodes)


def _put_beside(model: onnx.ModelProto, folder: Path, draw: random.Random) -> None:
    """Moves some of the tensors into a file beside the model."""
    data = bytearray()
    for tensor in model.graph.initializer:
        if tensor.HasField("raw_data") and draw.random() < 0.7:
            data += bytes(-len(data) % draw.choice([1, 64]))
            items: dict[str, Any] = {"location": DATA, "offset": len(data)}
            data += tensor.raw_data
            items["length"] = len(tensor.raw_data)
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in items.items():
                tensor.external_data.add(key=key, value=str(value))
    (folder / DATA).write_bytes(bytes(data))


def make_session(folder: Path) -> None:
    model = onnx.load_from_string(_models()[0])
    _put_beside(model, folder, random.Random(0))
    (folder / MODEL).write_bytes(model.SerializeToString())


def change_session(folder: Path, draw: random.Random, outside: Path) -> str:
    *most, old = _models()
    model = onnx.load_from_string(old if draw.random() < 0.02 else draw.choice(most))
    _put_beside(model, folder, draw)
    path = folder / MODEL
    kind = draw.random()
    if kind < 0.08:
        path.write_bytes(model.SerializeToString())
        return changed_place(folder, [DATA], draw, outside)  # a model may be named by a link
    if kind < 0.12:
        path.write_bytes(flipped(model.SerializeToString(), draw))
        return "other bytes"
    if kind < 0.4:
        path.write_bytes(changed_message(model.SerializeToString(), draw))
        return "other fields"
    said = []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        change = draw.choice(CHANGES)
        try:
            change(model, draw, outside)
        except (ValueError, TypeError, LookupError, AttributeError, OverflowError):
            continue  # the message does not hold such a value, or has nothing to change
        said.append(change.__name__.strip("_"))
    path.write_bytes(model.SerializeToString())
    return " ".join(said) or "nothing"


# ---- changes of a message


def _place(model: onnx.ModelProto, draw: random.Random, outside: Path) -> None:
    """Gives a tensor another place, or a wild number in it."""
    tensor = draw.choice([t for t in model.graph.initializer if t.external_data])
    entry = draw.choice(tensor.external_data)
    if entry.key == "location":
        entry.value = draw.choice([*lures_of(outside, DATA), MODEL, "/dev/zero", "/proc/self/mem"])
    else:
        wild = [str(n) for n in HUGE]
        entry.value = draw.choice([*wild, "", "x", "0x1", " 1", "1.0", "9" * 400])
    if draw.random() < 0.2:
        key = draw.choice(["__class__", "basepath", "location", "checksum", "offset"])
        tensor.external_data.add(key=key, value=draw.choice(["..", "0", str(outside)]))


def _tensor(model: onnx.ModelProto, draw: random.Random, outside: Path) -> None:
    """Gives a tensor other sizes, another type, or other numbers."""
    tensor = draw.choice(model.graph.initializer)
    kind = draw.randrange(3 if tensor.external_data else 4)
    if kind == 0:
        tensor.dims[draw.randrange(len(tensor.dims))] = draw.choice(HUGE)
    elif kind == 1:
        tensor.data_type = draw.randrange(-1, 30)
    elif kind == 2:
        tensor.dims.append(draw.choice([0, 1, 2, -1, 2**40]))
    else:
        array = np.array(numpy_helper.to_array(tensor)).reshape(-1)
        wild = draw.choice(FLOATS) if array.dtype.kind == "f" else draw.choice(HUGE)
        array[draw.randrange(array.size)] = wild
        tensor.raw_data = array.tobytes()


def _attribute(model: onnx.ModelProto, draw: random.Random, outside: Path) -> None:
    node = draw.choice([n for n in model.graph.node if n.attribute])
    a = draw.choice(node.attribute)
    if a.ints and draw.random() < 0.8:
        a.ints[draw.randrange(len(a.ints))] = draw.choice(HUGE)
    elif a.type == onnx.AttributeProto.INT:
        a.i = draw.choice(HUGE)
    elif a.type == onnx.AttributeProto.FLOAT:
        a.f = draw.choice(FLOATS)
    elif a.type == onnx.AttributeProto.STRING:
        a.s = draw.choice([b"", b"\xff", b"nearest", b"cubic", b"linear", b"wrap", b"SAME_UPPER"])
    else:
        a.type = draw.randrange(16)  # type: ignore[assignment]


def _info(model: onnx.ModelProto, draw: random.Random, outside: Path) -> None:
    info = draw.choice([*model.graph.input, *model.graph.output])
    tensor = info.type.tensor_type
    if draw.random() < 0.5:
        tensor.elem_type = draw.randrange(30)
    else:
        dim = draw.choice(tensor.shape.dim)
        dim.dim_value = draw.choice(HUGE)


def _edge(model: onnx.ModelProto, draw: random.Random, outside: Path) -> None:
    """Gives a node another value as an input or output."""
    node = draw.choice(model.graph.node)
    names = [n for x in model.graph.node for n in (*x.input, *x.output)] + [""]
    where = node.input if draw.random() < 0.7 and node.input else node.output
    kind = draw.randrange(3)
    if kind == 0:
        where[draw.randrange(len(where))] = draw.choice(names)
    elif kind == 1:
        where.append(draw.choice(names))
    else:
        del where[-1]


def _opset(model: onnx.ModelProto, draw: random.Random, outside: Path) -> None:
    old = draw.randrange(1, 13) if draw.random() < 0.1 else 13  # a process converts those
    model.opset_import[0].version = draw.choice([-1, 0, old, *range(14, 32), 2**31, 2**62])


@functools.cache
def _schemas() -> tuple[Any, ...]:
    names = sorted({s.name for s in onnx.defs.get_all_schemas() if s.domain == ""})
    return tuple(onnx.defs.get_schema(name) for name in names)


def _op(model: onnx.ModelProto, draw: random.Random, outside: Path) -> None:
    """Adds a node of any op, with attributes of the kinds that the op has, and with inputs of
    constants or of what there is."""
    schema = draw.choice(_schemas())
    names = [t.name for t in model.graph.initializer] + [i.name for i in model.graph.input]
    names += [n for x in model.graph.node for n in x.output]
    for i in range(draw.randrange(4)):
        shape = [draw.choice([0, 1, 2, 3]) for _ in range(draw.randrange(4))]
        kind = draw.choice([np.float32, np.int64, np.int64, bool])
        wild = draw.choice(FLOATS if kind is np.float32 else HUGE)
        name = f"c{len(model.graph.initializer)}_{i}"
        array = np.full(shape, wild).astype(kind)
        model.graph.initializer.append(numpy_helper.from_array(array, name))
        names += [name] * 6
    inputs = [draw.choice([*names, ""]) for _ in range(draw.randint(schema.min_input, 5))]
    node = helper.make_node(schema.name, inputs[: max(schema.max_input, 0)], ["fuzzed"])
    for name, known in schema.attributes.items():
        if draw.random() < 0.6 or known.required:
            whole = [draw.choice(HUGE) for _ in range(draw.randint(1, 4))]
            made: dict[str, Any] = {
                "INT": draw.choice(HUGE), "INTS": whole, "FLOAT": draw.choice(FLOATS),
                "FLOATS": [draw.choice(FLOATS) for _ in range(3)],
                "STRING": draw.choice(["", "linear", "cubic", "reflect", "SAME_LOWER", "LSTM"]),
            }  # fmt: skip
            if known.type.name in made:
                node.attribute.append(helper.make_attribute(name, made[known.type.name]))
    model.graph.node.insert(draw.randint(0, len(model.graph.node)), node)
    if draw.random() < 0.7:
        model.graph.output[0].name = "fuzzed"


def _function(model: onnx.ModelProto, draw: random.Random, outside: Path) -> None:
    """Adds functions that call each other, and a call."""
    if not any(o.domain == "wild" for o in model.opset_import):
        model.opset_import.add(domain="wild", version=1)
    count = draw.choice([1, 2, 3, 40])
    for i in range(count):
        made = model.functions.add(name=f"F{i}", domain="wild", input=["x"], output=["y"])
        made.opset_import.add(domain="", version=20)
        made.opset_import.add(domain="wild", version=1)
        other = draw.choice([i, i + 1, i + 1, i + 1, (i + 1) % count])
        op, domain = (f"F{other}", "wild") if other < count else ("Exp", "")
        calls = [("x", "m"), ("m", "y")] if draw.random() < 0.8 else [("x", "y")]
        for a, b in calls:
            made.node.add(op_type=op, domain=domain, input=[a], output=[b])
    source = model.graph.node[0].input[0]
    call = onnx.NodeProto(op_type="F0", domain="wild", input=[source], output=["called"])
    model.graph.node.insert(0, call)
    if draw.random() < 0.6:
        model.graph.output[0].name = "called"


Change = Callable[[onnx.ModelProto, random.Random, Path], None]
CHANGES: tuple[Change, ...] = (
    _place, _place, _tensor, _tensor, _attribute, _attribute, _info, _edge, _edge, _opset, _op, _op,
    _op, _op, _function,
)  # fmt: skip


# ---- loading


def load_session(folder: Path) -> TrainingSession:
    return TrainingSession(folder / MODEL)


def check_session(folder: Path, session: TrainingSession) -> str | None:
    """Says what is wrong where weights are not those of the file, as onnx reads it, or where the
    graph computes another result than onnx's reference evaluator."""
    try:
        model = onnx.load(folder / MODEL)
        onnx.checker.check_model(model)
        arrays = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    except Exception:
        return None  # onnx refuses it: there is no right meaning
    weights = session.state_dict()
    for name, array in arrays.items():
        if name in weights and not np.array_equal(array, weights[name], equal_nan=True):
            return f"another weight {name}"
    if any(n.op_type not in _known() for n in model.graph.node) or not session.source.is_open:
        return None  # the evaluator of onnx has errors of its own in rare ops
    return _compared(session, model)


def _compared(session: TrainingSession, model: onnx.ModelProto) -> str | None:
    graph = session.module.graph({}, {})
    sizes = [n for node in graph for v in node.outputs for n in type_of(v).shape]
    if any(isinstance(n, int) and n > MOST for n in sizes):
        return None
    draw = np.random.default_rng(0)
    feeds: dict[str, Any] = {}
    for value in graph.inputs:
        type, name = type_of(value), str(value.name)
        shape = [n if isinstance(n, int) else 3 for n in type.shape]
        if len(shape) > 4 or any(not 0 <= n < 100 for n in shape):
            return None
        feeds[name] = np.asarray(2 * draw.random(shape)).astype(type.dtype.numpy())
    given = {name: feeds[name] for name in session.source.inputs if name in feeds}
    paths = session.module.program.paths
    for path in set(paths.values()):
        feeds[parameter_name(path)] = session.module.get_parameter(path).detach().numpy()
    try:
        with np.errstate(all="ignore"):
            want: Any = ReferenceEvaluator(model).run(None, given)
    except Exception:
        return None
    with np.errstate(all="ignore"):
        have = evaluate(graph, {str(v.name): feeds[str(v.name)] for v in graph.inputs})
    for info, y in zip(model.graph.output, want, strict=True):
        x = np.asarray(have[info.name])
        if x.shape != np.shape(y) or not np.allclose(x, y, 1e-3, 1e-4, equal_nan=True):
            return f"another result, as of {x.shape} and {np.shape(y)}"
    return None


FORMATS: dict[str, Format] = {
    "session": Format(make_session, change_session, load_session, check_session, (OnwardError,)),
}
