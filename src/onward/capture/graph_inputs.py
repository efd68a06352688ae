"""Makes a graph's inputs: parameters and buffers by identity, then the batch's tensors."""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec

from onward.capture.aten.complex_numbers import Complex, constant
from onward.capture.batch_leaves import BatchLeaves
from onward.capture.captured_module import CapturedModule
from onward.capture.dtypes import to_type
from onward.capture.trace.autocast_blocks import LOW_TYPES
from onward.capture.trace.flat_call import FlatCall, model_path, named_tensors
from onward.capture.translate.translator import Translator
from onward.errors import CaptureError
from onward.graph.build import Builder
from onward.graph.graph import Role, Value, type_of
from onward.graph.names import BATCH, BUFFER, PARAM
from onward.graph.types import DType
from onward.model_state.refusals import refuse_constant

_LITERAL = torch.ops.aten.lift_fresh_copy.default  # the op that reads `torch.tensor(3)`'s constant


def batch_nodes(program: ExportedProgram) -> list[torch.fx.Node]:
    """Returns the placeholders of the batch's tensors, in the order of the leaves."""
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    return [
        placeholders[s.arg.name]
        for s in program.graph_signature.input_specs
        if s.kind is InputKind.USER_INPUT
    ]


def bind_inputs(
    result: CapturedModule,
    translator: Translator,
    program: ExportedProgram,
    flat: FlatCall,
    leaves: BatchLeaves,
) -> dict[torch.fx.Node, Value]:
    """Makes the graph's inputs, and records in `result` the tensor or leaf of each. Returns a map
    from buffers' placeholders to graph inputs.

    Raises CaptureError for an input that is no tensor, or a constant tensor that has a gradient.
    """
    inputs = _Inputs(result, translator, program, flat, leaves)
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    batch = batch_nodes(program)
    for node, tensor in zip(batch, leaves.tensors, strict=True):
        translator.name_sizes(node, tensor)
    translator.settle_sizes(batch)
    translator.batch = {node: [] for node in batch}
    buffers: dict[Value, list[torch.fx.Node]] = {}
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        value = inputs.made(spec, node)
        translator.env[node] = value
        if isinstance(value, Value) and (value.name or "") in result.buffers:
            buffers.setdefault(value, []).append(node)
    translator.find_batch_size()
    for nodes in buffers.values():
        read = [node for node in nodes if node.users]  # a trace reads a tied buffer by one name
        if len(read) == 1:
            translator.buffers[read[0]] = ()
    return {node: translator.env[node] for node in translator.buffers}


class _Inputs:
    """Makes the inputs of one graph, a placeholder at a time."""

    def __init__(
        self,
        result: CapturedModule,
        translator: Translator,
        program: ExportedProgram,
        flat: FlatCall,
        leaves: BatchLeaves,
    ) -> None:
        self._result, self._translator, self._program = result, translator, program
        self._graph, self._leaves = translator.graph, leaves
        self._live = dict(named_tensors(flat))
        # a tied tensor's first name, the one that torch lists
        self._first = {id(t): n for n, t in reversed(self._live.items())}
        self._by_id: dict[int, Value] = {}
        self._users = 0  # how many of the batch's leaves have an input so far

    def made(self, spec: InputSpec, node: torch.fx.Node) -> Value | Complex:
        """Returns the graph's value for an input of the exported program. Raises CaptureError."""
        if spec.kind is InputKind.USER_INPUT:
            return self._leaf(node)
        target = spec.target or ""
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            return self._owned(target)
        constant_of = self._program.constants.get(target)
        if spec.kind is InputKind.CONSTANT_TENSOR and isinstance(constant_of, torch.Tensor):
            refuse_constant(constant_of, {model_path(n): t for n, t in self._live.items()})
            self._result.constants.append(constant_of)
            self._result.literals += {n.target for n in node.users} == {_LITERAL}
            return constant(self._graph, constant_of)
        raise CaptureError(
            f"the forward reads {spec.target}, which is not a tensor (a torch.Generator, "
            "for example); fix: draw before the step and pass the numbers as an input of "
            "the batch"
        )

    def _leaf(self, node: torch.fx.Node) -> Value:
        """Returns the value of the batch's next leaf: an input in the caller's dtype, followed by a
        cast to f32 where that is a 16-bit float (accepted under autocast alone)."""
        kind = self._translator.type_of_fx(node)
        low = LOW_TYPES.get(self._leaves.tensors[self._users].dtype)
        if low is not None:
            kind = kind.with_dtype(low)
        value = self._graph.input(BATCH + self._leaves.names[self._users], kind, Role.BATCH)
        for dim, size in enumerate(type_of(value).shape):
            self._result._sizes.append((self._users, dim, size))
        self._result.leaves[self._users] = value.name or ""
        self._users += 1
        return value if low is None else Builder(self._graph).Cast(value, to=DType.FLOAT)

    def _owned(self, target: str) -> Value:
        """Returns the input of a parameter or a buffer; tied tensors share one input."""
        program, result = self._program, self._result
        tensor = self._live.get(target)
        if tensor is None:
            tensor = program.state_dict.get(target, program.constants.get(target))
        assert isinstance(tensor, torch.Tensor), f"{target} is not in the model"
        if id(tensor) in self._by_id:
            return self._by_id[id(tensor)]
        path = model_path(self._first.get(id(tensor), target))
        if isinstance(tensor, torch.nn.Parameter):
            value = self._graph.input(PARAM + path, to_type(tensor), Role.PARAM)
            result.parameters[PARAM + path] = tensor
            if not tensor.requires_grad:
                result.frozen.add(PARAM + path)
        else:
            value = self._graph.input(BUFFER + path, to_type(tensor), Role.BUFFER)
            result.buffers[BUFFER + path] = tensor
        self._by_id[id(tensor)] = value
        return value


__all__ = ["batch_nodes", "bind_inputs"]
