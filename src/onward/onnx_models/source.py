"""OnnxSource: an ONNX model as it was given, in the form in which its graph can be read.

The reader takes opset 20 and newer, and what is unchanged since opset 13; onnx's own converter
brings other models to that form. Weights inside of Constant nodes count as initializers.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import numpy_helper, version_converter

from onward.errors import OnwardError, one_line
from onward.graph.graph import Graph
from onward.graph.importer import from_onnx, input_type
from onward.graph.types import Type

# inputs, by place, that are settings or statistics of an op, even where they are of f32
SETTINGS: dict[str, tuple[int, ...]] = {
    "BatchNormalization": (3, 4), "Clip": (1, 2), "DequantizeLinear": (1,), "OneHot": (2,),
    "Pad": (2,), "QuantizeLinear": (1,), "Resize": (1, 2), "Upsample": (1,),
}  # fmt: skip
READ_AS = 21  # the opset to which older models are converted
NAMED_SO = 13  # opsets from here on are mostly read as they are
OLDEST = 7  # the oldest opset that onnx's converter takes
AGE = "it has the form of opset"  # in the reader's message for a model that is too old
# in its messages for what it could read if the sizes were known
OF_SIZES = ("fixed size", "needs a constant as its input", "must be a known shape", "do not divide",
            "depends on data", "open size", "element counts")  # fmt: skip
# numbers as large as this stand for minus infinity in a mask, not in a weight
MASKED = 1e4


@dataclass(frozen=True, eq=False)
class OnnxSource:
    """An ONNX model. given: as it was given, for writing it back. model: the form that is read, of
    equal weights by name. path: of its file, if it is one. is_open: whether one graph serves all
    sizes; otherwise each combination of sizes has a graph of its own. named: the initializers that
    are weights, whatever they look like; None: those that look like weights."""

    given: onnx.ModelProto
    model: onnx.ModelProto
    path: Path | None = None
    is_open: bool = True
    named: frozenset[str] | None = None

    @classmethod
    def of(cls, given: Any, named: Collection[str] | None = None) -> OnnxSource:
        """Reads a path, a ModelProto or an onnx_ir.Model. named: the weights, of a maker who knows
        them. Raises OnwardError for anything else, and for a file that cannot be read."""
        path: Path | None = None
        if isinstance(given, (str, Path)):
            path = Path(given)
            given = _loaded(path)
        elif isinstance(given, ir.Model):
            given = ir.serde.serialize_model(given)
        if not isinstance(given, onnx.ModelProto):
            raise OnwardError(
                f"the model is a {type(given).__name__}; fix: a path to an .onnx file, an "
                "onnx.ModelProto, or an onnx_ir.Model"
            )
        model = onnx.ModelProto()
        model.CopyFrom(given)
        _name_constants(model.graph)
        readable, open_sizes = _readable(model)
        return cls(given, readable, path, open_sizes, None if named is None else frozenset(named))

    def graph(self, parameters: Mapping[str, str], dims: Mapping[str, int]) -> Graph:
        """The model as a graph. parameters: the graph input of each weight that is one, by
        initializer; that of a turned one is its transpose. dims: sizes that are numbers, by name.
        Raises OnwardError for a model that no graph can hold."""
        try:
            return from_onnx(
                self.model, dims, parameters=parameters, turned=self.turned, draws=True
            )
        except ValueError as error:
            raise OnwardError(f"this ONNX model {error}") from error

    def weights(self) -> dict[str, np.ndarray]:
        """The weights by name: those that are `named`, or else the initializers of f32 with more
        than one number; not masks, nor what an op takes as a setting."""
        found: dict[str, np.ndarray] = {}
        for tensor in self.model.graph.initializer:
            if self.named is not None:
                if tensor.name in self.named:
                    found[tensor.name] = numpy_helper.to_array(tensor)
                continue
            if tensor.name in self._settings:
                continue
            if tensor.data_type == onnx.TensorProto.FLOAT and np.prod(tensor.dims) > 1:
                array = numpy_helper.to_array(tensor)
                if not _is_mask(array):
                    found[tensor.name] = array
        return found

    @cached_property
    def turned(self) -> frozenset[str]:
        """The weights that are read as the right factor of a MatMul alone, `f32[K,N]`: the
        transposes of what a linear layer of PyTorch holds."""
        rank = {t.name: len(t.dims) for t in self.model.graph.initializer}
        right = {n.input[1] for n in self.model.graph.node if n.op_type == "MatMul"}
        others = {
            x
            for n in self.model.graph.node
            for i, x in enumerate(n.input)
            if (n.op_type, i) != ("MatMul", 1)
        }
        outputs = {x.name for x in self.model.graph.output}
        return frozenset(n for n in right - others - outputs if rank.get(n) == 2)

    @cached_property
    def _settings(self) -> frozenset[str]:
        """What ops take as settings or statistics."""
        return frozenset(
            x
            for n in self.model.graph.node
            for i, x in enumerate(n.input)
            if i in SETTINGS.get(n.op_type, ())
        )

    @cached_property
    def inputs(self) -> dict[str, Type]:
        """The types of the inputs that a caller gives, by name. Raises OnwardError for an input
        that is no tensor."""
        own = {t.name for t in self.model.graph.initializer}
        try:
            return {x.name: input_type(x, {}) for x in self.model.graph.input if x.name not in own}
        except ValueError as error:
            raise OnwardError(f"this ONNX model cannot be fed: {error}") from error


def _loaded(path: Path) -> onnx.ModelProto:
    if not path.is_file():
        raise OnwardError(f"no such file {str(path)!r}; fix: name an .onnx file")
    try:
        return onnx.load(path)
    except Exception as error:  # whatever protobuf, numpy and the file system raise
        said = one_line(str(error) or type(error).__name__, 200)
        raise OnwardError(f"cannot read {str(path)!r} as ONNX: {said}") from error


def _name_constants(graph: onnx.GraphProto) -> None:
    """Makes initializers of the f32 tensors of Constant nodes that may be weights."""
    for node in list(graph.node):
        values = [a.t for a in node.attribute if a.name == "value"]
        if node.op_type != "Constant" or node.domain not in ("", "ai.onnx") or len(values) != 1:
            continue
        [tensor] = values
        if tensor.data_type == onnx.TensorProto.FLOAT and np.prod(tensor.dims) > 1:
            named = onnx.TensorProto()
            named.CopyFrom(tensor)
            named.name = node.output[0]
            graph.initializer.append(named)
            graph.node.remove(node)


def _readable(model: onnx.ModelProto) -> tuple[onnx.ModelProto, bool]:
    """The model, converted to another opset where it can only be read so, and whether it can be
    read with open sizes. Raises OnwardError for one that cannot be read at all."""
    opset = next((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), 1)
    first = _why_not(model)
    if first is None:
        return model, True
    aged = opset < NAMED_SO or AGE in first  # of an old form, or perhaps one behind what it said
    if OLDEST <= opset < READ_AS and aged:
        try:
            converted = version_converter.convert_version(model, READ_AS)
        except Exception as error:  # whatever onnx's converter raises
            said = one_line(str(error) or type(error).__name__, 120)
            raise OnwardError(f"this ONNX model {first} (onnx's converter: {said})") from error
        second = _why_not(converted)
        if second is None:
            return converted, True
        model, first = converted, second
    if any(word in first for word in OF_SIZES) and _has_open_sizes(model):
        return model, False  # it may be read once the sizes are known
    raise OnwardError(f"this ONNX model {first}")


def _why_not(model: onnx.ModelProto) -> str | None:
    try:
        from_onnx(model, draws=True)
    except ValueError as error:
        return str(error)
    return None


def _has_open_sizes(model: onnx.ModelProto) -> bool:
    own = {t.name for t in model.graph.initializer}
    infos = [x for x in model.graph.input if x.name not in own]
    return any(not input_type(x, {}).is_static for x in infos)


def _is_mask(array: np.ndarray) -> bool:
    """Whether an array hides something by numbers that no weight has."""
    return bool(array.size) and not bool(np.abs(array).max() < MASKED)


__all__ = ["OnnxSource"]
