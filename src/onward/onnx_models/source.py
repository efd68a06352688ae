"""OnnxSource: an ONNX model as it was given, in the form in which its graph can be read.

The reader takes opset 20 and newer, and what is unchanged since opset 13; onnx's own converter
brings other models to that form. Weights inside of Constant nodes count as initializers. The
numbers of large tensors stay where they are, in files or in the message that was given, until they
are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, numpy_helper

from onward.errors import OnwardError, one_line
from onward.graph.graph import Graph
from onward.graph.importer import from_onnx, input_type
from onward.graph.importer.decomposition import said_of
from onward.graph.importer.local_functions import inlined
from onward.graph.importer.nested_nodes import nodes_within
from onward.graph.names import parameter_name
from onward.graph.types import Type
from onward.onnx_models.batch_norm import say_training
from onward.onnx_models.conversion import converted
from onward.onnx_models.data_files import own_file
from onward.onnx_models.dropout import put_dropout
from onward.onnx_models.light import GivenTensor, add_raised, light_copy
from onward.onnx_models.old_meaning import by_old_rule, flatten_hardmax, old_resizes
from onward.onnx_models.skeleton import read_skeleton
from onward.onnx_models.soundness import check_model, inner_tensors, opset_of
from onward.onnx_models.tensors import Files, Stored

# inputs, by place, that are settings or statistics of an op, even where they are of f32
SETTINGS: dict[str, tuple[int, ...]] = {
    "BatchNormalization": (3, 4), "Clip": (1, 2), "DequantizeLinear": (1,), "OneHot": (2,),
    "Pad": (2,), "QuantizeLinear": (1,), "Resize": (1, 2), "Upsample": (1,),
}  # fmt: skip
# ops whose results are the elements of their first input, or of all inputs
HANDED_ON = {"Cast", "Concat", "Identity", "Reshape", "Slice", "Squeeze", "Unsqueeze"}
READ_AS = 21  # the opset to which older models are converted
NAMED_SO = 13  # opsets from here on are mostly read as they are
OLDEST = 7  # the oldest opset that onnx's converter takes
AGE = "it has the form of opset"  # in the reader's message for a model that is too old
# in its messages for what it could read if the sizes were known
OF_SIZES = ("fixed size", "needs a constant as its input", "must be a known shape", "do not divide",
            "depends on data", "open size", "element counts", "do not broadcast",
            "inner sizes differ", "channels", "constant ends")  # fmt: skip
# numbers as large as this stand for minus infinity in a mask, not in a weight
MASKED = 1e4
ASKED = "needs a constant as its input"  # in its messages for what depends on a number
PREFIX = "this ONNX model "  # of what is said of a model that cannot be read


@dataclass(frozen=True, eq=False)
class OnnxSource:
    """An ONNX model. given: as it was given, for writing it back; of a file, without the numbers of
    large tensors. model: the form that is read, of equal weights by name. path: of its file, if it
    is one. is_open: whether one graph serves all sizes; otherwise each combination of sizes has a
    graph of its own. tensors: where the numbers of external initializers of `model` are, by name.
    files: those that hold them. numbers: inputs of one whole number, or one truth, whose content a
    graph is read for. named: the initializers that are weights, whatever they look like; None:
    those that look like weights."""

    given: onnx.ModelProto
    model: onnx.ModelProto
    path: Path | None = None
    is_open: bool = True
    tensors: Mapping[str, Stored | GivenTensor] = field(default_factory=dict)
    files: Files = field(default_factory=Files)
    numbers: frozenset[str] = frozenset()
    named: frozenset[str] | None = None

    @classmethod
    def of(
        cls,
        given: Any,
        named: Collection[str] | None = None,
        dropout: Mapping[str, float] | None = None,
    ) -> OnnxSource:
        """Reads a path, a ModelProto or an onnx_ir.Model. named: the weights, of a maker who knows
        them. dropout: probabilities by the values behind which it is put. Raises OnwardError for
        anything else, and for a file that cannot be read."""
        known, drops = None if named is None else frozenset(named), dict(dropout or {})
        if isinstance(given, (str, Path)):
            path = Path(given)
            files = Files(own_file(path))
            try:
                return cls._read(read_skeleton(files.own), path, files, known, drops)  # type: ignore[arg-type]
            except Exception as error:  # whatever protobuf, numpy and the file system raise
                said = str(error) if isinstance(error, ValueError) else repr(error)
                where = one_line(repr(str(path)), 160)
                said = one_line(said.removeprefix(PREFIX), 480 - len(where))
                raise OnwardError(f"cannot read {where} as ONNX: {said}") from error
        if isinstance(given, ir.Model):
            given = ir.serde.serialize_model(given)
        if not isinstance(given, onnx.ModelProto):
            raise OnwardError(
                f"the model is a {type(given).__name__}; fix: a path to an .onnx file, an "
                "onnx.ModelProto, or an onnx_ir.Model"
            )
        return cls._read(given, None, Files(), known, drops)

    @classmethod
    def _read(
        cls,
        given: onnx.ModelProto,
        path: Path | None,
        files: Files,
        named: frozenset[str] | None,
        dropout: Mapping[str, float],
    ) -> OnnxSource:
        try:
            check_model(given)
        except OnwardError as error:
            raise OnwardError(f"{PREFIX}cannot be read: {error}") from error
        model, held = light_copy(given)
        tensors: dict[str, Stored | GivenTensor] = dict(held)
        for tensor in model.graph.initializer:
            if tensor.data_location == TensorProto.EXTERNAL and tensor.name not in held:
                tensors[tensor.name] = files.stored(tensor)
        inner = [
            (tensor, files.stored(tensor))
            for tensor in inner_tensors(model)
            if tensor.data_location == TensorProto.EXTERNAL
        ]
        files.check_total([
            *(x for x in tensors.values() if isinstance(x, Stored)), *(x for _, x in inner)
        ])  # fmt: skip
        for tensor, stored in inner:  # those of bodies and functions are constants
            tensor.raw_data = stored.content()
            tensor.ClearField("external_data")
            tensor.ClearField("data_location")
        add_raised(model.graph)
        put_dropout(model, dropout)
        try:
            model = inlined(model)
        except Exception as error:  # whatever onnx's inliner raises
            raise OnwardError(f"{PREFIX}{one_line(said_of(error), 400)}") from error
        say_training(model)
        flatten_hardmax(model)
        return _readable(cls(given, model, path, True, tensors, files, named=named))

    def graph(
        self,
        parameters: Mapping[str, str],
        dims: Mapping[str, int],
        numbers: Mapping[str, int] | None = None,
        buffers: Mapping[str, str] | None = None,
    ) -> Graph:
        """The model as a graph. parameters: the graph input of each weight that is one, by
        initializer; that of a turned one is its transpose. dims: sizes that are numbers, by name.
        numbers: the contents of inputs that are constants of the graph. buffers: the graph input of
        each other initializer that is one. Raises OnwardError for a model that no graph can
        hold."""
        given = {*parameters, *(buffers or {})}
        known = {n: x for n, x in self.constants.items() if n not in given}
        for name, number in (numbers or {}).items():
            type = self.inputs[name]
            known[name] = np.full(type.shape, number, type.dtype.numpy())  # type: ignore[arg-type]
        try:
            return from_onnx(
                self.model, dims, known, parameters, self.turned, draws=True, buffers=buffers
            )
        except ValueError as error:
            raise OnwardError(f"{PREFIX}{error}") from error

    def arrays(self, names: Collection[str]) -> dict[str, np.ndarray]:
        """Initializers by name, read anew into memory of the caller's own; the `turned` as their
        transposes."""
        found: dict[str, np.ndarray] = {}
        for tensor in self.model.graph.initializer:
            if tensor.name in names:
                held = self.tensors.get(tensor.name) or GivenTensor(tensor)
                found[tensor.name] = held.array(tensor.name in self.turned)
        return found

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the weights: those that are `named`, or else the initializers of f32 with
        more than one number; not masks, nor what an op takes as a setting."""
        if self.named is not None:
            own = {tensor.name for tensor in self.model.graph.initializer}
            return self.named & own
        return frozenset(
            tensor.name
            for tensor in self.model.graph.initializer
            if tensor.data_type == TensorProto.FLOAT
            and math.prod(tensor.dims) > 1
            and tensor.name not in self._settings
            and not _is_mask(self._parts(tensor))
        )

    @cached_property
    def constants(self) -> dict[str, np.ndarray]:
        """The external initializers that are no weights."""
        return {n: x.array() for n, x in self.tensors.items() if n not in self.names}

    def _parts(self, tensor: TensorProto) -> Iterator[np.ndarray]:
        """The numbers of an f32 tensor, in parts."""
        stored = self.tensors.get(tensor.name)
        if isinstance(stored, Stored):
            yield from (np.frombuffer(part, "<f4") for part in stored.chunks())
        else:
            yield numpy_helper.to_array(tensor if stored is None else stored.tensor)

    @cached_property
    def turned(self) -> frozenset[str]:
        """The weights that are read as the right factor of a MatMul alone, `f32[K,N]`: the
        transposes of what a linear layer of PyTorch holds. None of a maker's own weights, which it
        reads and writes as they are."""
        if self.named is not None:
            return frozenset()
        rank = {t.name: len(t.dims) for t in self.model.graph.initializer}
        right = {n.input[1] for n in nodes_within(self.model.graph.node) if n.op_type == "MatMul"}
        others = {
            x
            for n in nodes_within(self.model.graph.node)
            for i, x in enumerate(n.input)
            if (n.op_type, i) != ("MatMul", 1)
        }
        outputs = {x.name for x in self.model.graph.output}
        return frozenset(n for n in right - others - outputs if rank.get(n) == 2)

    @cached_property
    def _settings(self) -> frozenset[str]:
        """What ops take as settings or statistics, also through nodes that hand them on."""
        nodes = list(nodes_within(self.model.graph.node))
        handed = {
            n.output[0]: n.input if n.op_type == "Concat" else n.input[:1]
            for n in nodes
            if n.op_type in HANDED_ON and n.output
        }
        found = {
            x for n in nodes for i, x in enumerate(n.input) if i in SETTINGS.get(n.op_type, ())
        }
        left = list(found)
        while left:
            more = {*handed.get(left.pop(), ())} - found
            found |= more
            left += more
        return frozenset(found)

    @cached_property
    def inputs(self) -> dict[str, Type]:
        """The types of the inputs that a caller gives, by name. Raises OnwardError for an input
        that is no tensor."""
        own = {t.name for t in self.model.graph.initializer}
        try:
            return {x.name: input_type(x, {}) for x in self.model.graph.input if x.name not in own}
        except ValueError as error:
            raise OnwardError(f"this ONNX model cannot be fed: {error}") from error


def _readable(source: OnnxSource) -> OnnxSource:
    """The source, its model converted to another opset where it can only be read so, and whether it
    can be read with open sizes. Raises OnwardError for one that cannot be read at all."""
    model = source.model
    opset = opset_of(model)
    first = _why_not(source)
    if first is None:
        return source
    aged = opset < NAMED_SO or AGE in first  # of an old form, or perhaps one behind what it said
    if OLDEST <= opset < READ_AS and aged:
        try:
            resized = old_resizes(model)
            source = replace(source, model=converted(model, READ_AS))
            by_old_rule(source.model, resized)
        except OnwardError as error:
            raise OnwardError(f"{PREFIX}{first} ({error})") from error
        second = _why_not(source)
        if second is None:
            return source
        first = second
    if ASKED in first and (numbers := _single_numbers(source)):
        return replace(source, is_open=False, numbers=numbers)
    if any(word in first for word in OF_SIZES) and _has_open_sizes(source.model):
        return replace(source, is_open=False)  # it may be read once the sizes are known
    raise OnwardError(f"{PREFIX}{first}")


def _why_not(source: OnnxSource) -> str | None:
    """Why a model cannot be read with its weights as inputs; None where it can."""
    try:
        source.graph({name: parameter_name(name) for name in source.names}, {})
    except OnwardError as error:
        return str(error).removeprefix(PREFIX)
    return None


def _single_numbers(source: OnnxSource) -> frozenset[str]:
    """The inputs of one whole number or one truth, by which a model may choose what it computes."""
    return frozenset(
        name
        for name, type in source.inputs.items()
        if not type.is_floating and type.shape in ((), (1,))
    )


def _has_open_sizes(model: onnx.ModelProto) -> bool:
    own = {t.name for t in model.graph.initializer}
    infos = [x for x in model.graph.input if x.name not in own]
    return any(not input_type(x, {}).is_static for x in infos)


def _is_mask(parts: Iterator[np.ndarray]) -> bool:
    """Whether an array hides something by numbers that no weight has."""
    return any(
        bool(x.size) and not (bool(x.max() < MASKED) and bool(x.min() > -MASKED)) for x in parts
    )


__all__ = ["OnnxSource"]
