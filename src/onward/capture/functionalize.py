"""Functionalization: ops that write in place become ops that return new values.

Whoever reads the same memory later sees what was written. A graph's values never change, so the
tensors that name the memory get new values. Where an op wrote a window of a tensor
(`x[:, 1:] = y`), the tensor is written anew around it. A buffer that a forward writes has a next
value, which the step stores (buffer_updates.py).
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from onward.capture.aten import Call
from onward.graph.graph import Value, type_of

_WINDOWS = ("aten.slice.Tensor", "aten.select.int")
_DETACHED = "aten.detach.default"  # a buffer's gradient is nobody's
_ASSIGNMENTS = ("aten.copy_.default", "aten.fill_.Tensor", "aten.fill_.Scalar")


def writes(target: Any) -> bool:
    schema = getattr(target, "_schema", None)
    return schema is not None and any(
        a.alias_info is not None and a.alias_info.is_write for a in schema.arguments
    )


def _aliases(target: Any) -> bool:
    """Whether the op's results may be views of its inputs, or its inputs themselves."""
    if target is operator.getitem or isinstance(target, torch._ops.HigherOrderOperator):
        return True
    schema = getattr(target, "_schema", None)
    return schema is not None and any(r.alias_info is not None for r in schema.returns)


def path_to_owner(written: Any) -> list[Any]:
    """From the tensor that an op writes to the one that owns its memory."""
    path = [written]
    while path[-1].op == "call_function" and _aliases(path[-1].target):
        inner = path[-1].args[0]
        if not isinstance(inner, torch.fx.Node):
            break
        path.append(inner)
    return path


def may_write(
    node: Any, written: Any, order: dict[Any, int], buffers: Mapping[Any, Sequence[Any]]
) -> bool:
    """Whether nothing that is read after this op would show a value from before it.

    written: the tensor that the op writes. order: the nodes' places in their program. buffers: the
    nodes that stand for the model's buffers: within a region of another mode, for which outside,
    and the region.
    """
    path = path_to_owner(written)
    owner = path[-1]
    if owner not in buffers and (owner.op != "call_function" or _aliases(owner.target)):
        return False  # the user's memory, or what a region of another mode returned
    passable = _WINDOWS if str(node.target) in _ASSIGNMENTS else ()
    if owner in buffers:
        passable = (*passable, _DETACHED)
    if not all(writes(step.target) or str(step.target) in passable for step in path[:-1]):
        return False
    if _read_later(owner, node, path, order):
        return False
    while buffers.get(owner):
        owner, region = buffers[owner]
        if _read_later(owner, region, [owner], order):
            return False
    return True


def _read_later(owner: Any, node: Any, path: Sequence[Any], order: dict[Any, int]) -> bool:
    """Whether what shares the owner's memory before a node, but for `path`, is read after it."""
    others = [n for n in _sharing(owner) if order.get(n, -1) < order[node] and n not in path]
    return any(order[user] > order[node] for other in others for user in other.users)


def _sharing(owner: Any) -> list[Any]:
    """The owner and all that may be views of it."""
    found: dict[Any, None] = {}
    stack = [owner]
    while stack:
        node = stack.pop()
        if node not in found:
            found[node] = None
            stack += [u for u in node.users if u.op == "call_function" and _aliases(u.target)]
    return list(found)


def settle(written: Any, value: Value, c: Call) -> None:
    """Gives all names of the memory that an op has written their new values."""
    path = path_to_owner(written)
    c.t.env[path[0]] = value
    for window, whole in pairwise(path):
        if not writes(window.target) and str(window.target) != _DETACHED:
            value = _written(c, c.t.env[whole], window, value)
        c.t.env[whole] = value


def _written(c: Call, whole: Value, window: Any, value: Value) -> Value:
    """`whole` with `value` where `window`, a slice or a select of it, lies."""
    dim, start, *_ = [*window.args[1:], *(0, None)[len(window.args) - 1 :]]
    dim %= type_of(whole).rank
    if str(window.target) == "aten.select.int":
        value = c.b.unsqueeze(value, [dim])
    size = type_of(whole).shape[dim]
    first, _ = c.bounds(size, c.t.size_of_argument(start or 0), None)
    last = first + type_of(value).shape[dim]
    parts = [value]
    if first != 0:
        parts.insert(0, c.b.slice(whole, dim, 0, first))
    if last != size:
        parts.append(c.b.slice(whole, dim, last, size))
    return c.b.Concat(*parts, axis=dim) if len(parts) > 1 else value
