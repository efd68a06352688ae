"""Puts the nodes of a model's own functions in place of their calls, by onnx's inliner.

onnx's inliner follows calls without a limit: functions that call themselves end the process, and
some dozens of functions that call the next one twice fill the memory. It also loses the defaults of
a function's attributes, and leaves calls of functions of another opset.
"""

from __future__ import annotations

import onnx
from onnx.inliner import inline_local_functions

from onward.errors import one_line
from onward.graph.importer.nested_nodes import nodes_within

MOST = 1 << 16  # most nodes of a model once the functions' nodes are in their places
STANDARD = ("", "ai.onnx")
DEEPEST = 64  # most functions within functions
_Key = tuple[str, str, str]


def inlined(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model without functions: itself where it has none. Raises ValueError for functions that
    `check_functions` refuses, and for one whose opset gives its ops another form."""
    if not model.functions:
        return model
    check_functions(model)
    made = onnx.ModelProto()
    made.CopyFrom(model)
    functions = {_key(f): f for f in made.functions}
    for nodes in (made.graph.node, *(f.node for f in made.functions)):
        for node in nodes_within(nodes):
            called = functions.get(_call(node))
            given = {a.name for a in node.attribute}
            if called is not None:
                node.attribute.extend(a for a in called.attribute_proto if a.name not in given)
    opset = next((o.version for o in made.opset_import if o.domain in STANDARD), None)
    for function in made.functions:
        for item in function.opset_import:
            if item.domain in STANDARD and opset is not None and item.version != opset:
                _require_alike(function, item.version, opset)
                item.version = opset
    return inline_local_functions(made)


def _require_alike(function: onnx.FunctionProto, own: int, opset: int) -> None:
    """Raises ValueError for a function with ops that have another form in the model's opset."""
    for node in nodes_within(function.node):
        if node.domain in STANDARD and _form(node.op_type, own) != _form(node.op_type, opset):
            raise ValueError(
                f"cannot read the function {_said(_key(function))} of opset {own} in a model of "
                f"opset {opset}, since {one_line(node.op_type, 40)} differs between them; fix: "
                "onnx.inliner.inline_local_functions(model, convert_version=True)"
            )


def _form(op_type: str, opset: int) -> tuple[object, ...]:
    """The inputs and attributes of an op in an opset, whatever their types; () where it has no such
    op."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, "")
    except onnx.defs.SchemaError:
        return ()
    attributes = schema.attributes.items()
    kept = sorted((n, str(a.type), str(a.default_value)) for n, a in attributes)
    return ([(x.name, str(x.option)) for x in schema.inputs], kept)


def check_functions(model: onnx.ModelProto) -> None:
    """Raises ValueError for functions that call themselves, directly or through others, and for
    calls that come to more nodes than `MOST`."""
    bodies = {_key(f): list(nodes_within(f.node)) for f in model.functions}
    sizes: dict[_Key, int] = {}
    depths: dict[_Key, int] = {}
    calls = {key: {c for n in nodes if (c := _call(n)) in bodies} for key, nodes in bodies.items()}
    callers: dict[_Key, list[_Key]] = {key: [] for key in bodies}
    for key, inner in calls.items():
        for called in inner:
            callers[called].append(key)
    waiting = {key: len(inner) for key, inner in calls.items()}
    ends = [key for key, count in waiting.items() if not count]
    while ends:
        key = ends.pop()
        del waiting[key]
        sizes[key] = min(sum(sizes.get(_call(n), 1) for n in bodies[key]), MOST + 1)
        depths[key] = 1 + max((depths[c] for c in calls[key]), default=0)
        for caller in callers[key]:
            waiting[caller] -= 1
            if not waiting[caller]:
                ends.append(caller)
    if waiting:
        name = _said(next(iter(waiting)))
        raise ValueError(f"cannot read the function {name}, which calls itself")
    total = sum(sizes.get(_call(n), 1) for n in nodes_within(model.graph.node))
    if total > MOST:
        raise ValueError(f"cannot read functions whose calls come to more than {MOST} nodes")
    if max(depths.values(), default=0) > DEEPEST:
        raise ValueError(f"cannot read functions that call each other {DEEPEST} deep")


def _key(function: onnx.FunctionProto) -> _Key:
    domain = "" if function.domain == "ai.onnx" else function.domain
    return (domain, function.name, function.overload)


def _call(node: onnx.NodeProto) -> _Key:
    return ("" if node.domain == "ai.onnx" else node.domain, node.op_type, node.overload)


def _said(key: _Key) -> str:
    return one_line(str(key[1]), 80)


__all__ = ["inlined"]
