"""What the calls of a model's own functions come to, before onnx puts their nodes in place.

onnx's inliner follows calls without a limit: functions that call themselves end the process, and
some dozens of functions that call the next one twice fill the memory.
"""

from __future__ import annotations

import onnx

from onward.errors import one_line
from onward.graph.importer.nested_nodes import nodes_within

MOST = 1 << 16  # most nodes of a model once the functions' nodes are in their places
DEEPEST = 64  # most functions within functions
_Key = tuple[str, str, str]


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


__all__ = ["check_functions"]
