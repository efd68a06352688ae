"""A graph's inputs: the user's own parameters by identity, buffers, then the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch.export.graph_signature import InputKind

from onward.capture.aten.complex_numbers import constant
from onward.capture.captured_module import CapturedModule
from onward.capture.dtypes import to_type
from onward.capture.trace.autocast_blocks import LOW_TYPES
from onward.capture.trace.flat_call import FlatCall, model_path, named_tensors
from onward.capture.translate.translator import Translator
from onward.config import CaptureError
from onward.graph.build import Builder
from onward.graph.graph import Role, Value, type_of
from onward.graph.names import BATCH, BUFFER, PARAM
from onward.graph.types import DType
from onward.model_state.refusals import refuse_constant

_LITERAL = torch.ops.aten.lift_fresh_copy.default  # of what `torch.tensor(3)` has just made


def batch_nodes(program: Any) -> list[Any]:
    """The nodes that stand for the batch's leaves, in their order."""
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    return [
        placeholders[s.arg.name]
        for s in program.graph_signature.input_specs
        if s.kind is InputKind.USER_INPUT
    ]


def bind_inputs(
    result: CapturedModule,
    translator: Translator,
    program: Any,
    flat: FlatCall,
    tensors: list[torch.Tensor],
    names: list[str],
) -> dict[Any, Value]:
    """Makes the graph's inputs, and notes in `result` what each stands for. Returns those of the
    buffers, by node.

    tensors, names: of the batch's leaves. 16-bit ones, which only autocast takes, are cast to f32.
    Raises CaptureError for what no graph can hold.
    """
    graph = translator.graph
    by_id: dict[int, Value] = {}
    live = dict(named_tensors(flat))
    first = {id(t): n for n, t in reversed(live.items())}  # of tied ones, the name torch lists
    placeholders = {n.name: n for n in program.graph.nodes if n.op == "placeholder"}
    batch = batch_nodes(program)
    for node, tensor in zip(batch, tensors, strict=True):
        translator.name_sizes(node, tensor)
    translator.settle_sizes(batch)
    translator.batch = {node: [] for node in batch}
    buffers: dict[Value, list[Any]] = {}
    users = 0
    for spec in program.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        if spec.kind is InputKind.USER_INPUT:
            kind = translator.type_of_fx(node)
            low = LOW_TYPES.get(tensors[users].dtype)
            if low is not None:
                kind = kind.with_dtype(low)
            value = graph.input(BATCH + names[users], kind, Role.BATCH)
            for dim, size in enumerate(type_of(value).shape):
                result._sizes.append((users, dim, size))
            result.leaves[users] = value.name or ""
            users += 1
            if low is not None:
                value = Builder(graph).Cast(value, to=DType.FLOAT)
        elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            tensor = live.get(spec.target)
            if tensor is None:
                tensor = program.state_dict.get(spec.target, program.constants.get(spec.target))
            assert tensor is not None, f"{spec.target} is not in the model"
            if id(tensor) in by_id:
                value = by_id[id(tensor)]
            else:
                trained = isinstance(tensor, torch.nn.Parameter)
                name = (PARAM if trained else BUFFER) + model_path(
                    first.get(id(tensor), spec.target)
                )
                value = graph.input(name, to_type(tensor), Role.PARAM if trained else Role.BUFFER)
                by_id[id(tensor)] = value
                if isinstance(tensor, torch.nn.Parameter):
                    result.parameters[name] = tensor
                    if not tensor.requires_grad:
                        result.frozen.add(name)
                else:
                    result.buffers[name] = tensor
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            tensor = program.constants[spec.target]
            refuse_constant(tensor, {model_path(n): t for n, t in live.items()})
            result.constants.append(tensor)
            result.literals += {n.target for n in node.users} == {_LITERAL}
            value = constant(graph, tensor)
        else:
            raise CaptureError(
                f"the forward reads {spec.target}, which is no tensor that a graph can hold (a "
                "torch.Generator, for one); fix: draw outside, and make it an input of the batch"
            )
        translator.env[node] = value
        if isinstance(value, Value) and (value.name or "") in result.buffers:
            buffers.setdefault(value, []).append(node)
    translator.find_batch_size()
    for nodes in buffers.values():
        read = [node for node in nodes if node.users]  # a trace knows a tied one by one name
        if len(read) == 1:
            translator.buffers[read[0]] = ()
    return {node: translator.env[node] for node in translator.buffers}


__all__ = ["batch_nodes", "bind_inputs"]
