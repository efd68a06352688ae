"""Functionalization: replaces writes in place by new values.

A write is seen by every later reader of the same memory, but the values of a graph never change.
So every node that shows the memory gets a new value: a write into a view (`x[:, 1:] += y`) makes a
new value of the tensor that owns the memory, and every other view of it is computed again. A
buffer that the forward writes has a next value, which the step stores (buffer_updates.py).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from onward.capture.aten import TABLE, AtenCall
from onward.capture.trace.aliasing import is_region, source, writes
from onward.capture.trace.gradient_edges import carries
from onward.graph.graph import Value, type_of

Taken = Callable[[Any], None]  # computes a view's value again

# ops that return all elements in row-major order, or the tensor itself
_ALL = (
    "view", "reshape", "unsqueeze", "squeeze", "flatten", "unflatten", "view_as", "reshape_as",
    "ravel", "_unsafe_view", "_reshape_alias", "alias", "contiguous", "to", "type_as", "cpu",
    "lift_fresh", "dropout", "feature_dropout", "alpha_dropout", "atleast_1d", "atleast_2d",
    "atleast_3d", "expand", "expand_as", "broadcast_to",
)  # fmt: skip
_TURNED = (
    "transpose", "permute", "t", "swapaxes", "swapdims", "movedim", "moveaxis", "numpy_T", "mT",
    "adjoint", "matrix_H",
)  # fmt: skip
_WINDOWS = ("slice", "select", "narrow", "diagonal")
_PARTS = ("split", "split_with_sizes", "chunk", "unbind", "tensor_split")


def path_to_owner(written: Any) -> list[Any]:
    """Returns the chain of views from a node to the one that owns its memory, both included."""
    path = [written]
    while (inner := source(path[-1])) is not None:
        path.append(inner)
    return path


def may_write(
    node: Any,
    written: Any,
    order: dict[Any, int],
    buffers: Mapping[Any, Sequence[Any]],
    given: Mapping[Any, tuple[Any, Any]],
    batch: Collection[Any] = (),
) -> bool:
    """Returns whether a write by `node` into `written` can be functionalized.

    order: node -> its place in the program. buffers: nodes of the model's buffers; a placeholder in
    a gradient-mode region -> (the argument for it, the region). given: the same for other
    placeholders in regions. batch: placeholders of the batch's tensors, whose numbers have to be
    the same before and after (batch_writes.py).
    """
    path = path_to_owner(written)
    owner = path[-1]
    held = owner in buffers or owner in batch
    if not held and owner not in given and owner.op != "call_function":
        return False  # memory of the user's that is no buffer
    if not all(_passable(view, owner in buffers) for view in path[:-1]):
        return False
    if not all(_again(n) for n in _others(owner, node, path, order)):
        return False
    while buffers.get(owner):
        owner, region = buffers[owner]
        if _others(owner, region, [owner], order):
            return False
    return owner not in given or _unread(*given[owner], order, given)


def _unread(
    outside: Any, region: Any, order: dict[Any, int], given: Mapping[Any, tuple[Any, Any]]
) -> bool:
    """Returns whether a region alone reads an argument that it writes into: a tensor made in the
    forward, passed once, and not read after the region."""
    owner = path_to_owner(outside)[-1]
    if owner not in given and owner.op != "call_function":
        return False
    sharing = _sharing(owner)
    names = [a for a in region.args if isinstance(a, torch.fx.Node) and a in sharing]
    before = [n for n in sharing if order.get(n, -1) < order[region]]
    if len(names) > 1 or any(order[u] > order[region] for n in before for u in n.users):
        return False
    # in eager mode the write is not recorded and gradients pass; a graph would stop them here
    if carries(owner.meta["val"]) and any(n not in before and n.users for n in sharing):
        return False
    return owner not in given or _unread(*given[owner], order, given)


def _passable(view: Any, kept: bool) -> bool:
    """Returns whether the base's new value can be computed from its old one and the view's new one.
    kept: whether the base is a buffer."""
    stem = _stem(view)
    if writes(view.target) or stem in (*_TURNED, *_PARTS, *_WINDOWS):
        return True
    if view.target is operator.getitem:
        return not is_region(view.args[0])
    return _covers(view) if stem in _ALL else stem == "detach" and kept


def _covers(view: Any) -> bool:
    """Returns whether a view shows each element of its base exactly once."""
    shown, whole = (n.meta["val"] for n in (view, view.args[0]))
    return bool(shown.numel() == whole.numel())


def _again(node: Any) -> bool:
    """Returns whether a view can be computed again."""
    of_region = node.target is operator.getitem and is_region(node.args[0])
    return node.op == "call_function" and not of_region


def _others(owner: Any, node: Any, path: Sequence[Any], order: dict[Any, int]) -> list[Any]:
    """Returns, in order, the nodes from before `node` that show the owner's memory and are read
    after it, with the views between them and the owner; without those of `path`."""
    found: dict[Any, None] = {}
    for other in _sharing(owner):
        if order.get(other, -1) < order[node] and any(order[u] > order[node] for u in other.users):
            while other not in found and other not in path:
                found[other] = None
                other = source(other)
    return sorted(found, key=lambda n: order.get(n, -1))


def _sharing(owner: Any) -> list[Any]:
    """Returns the owner and all nodes that show its memory."""
    found: dict[Any, None] = {}
    stack = [owner]
    while stack:
        node = stack.pop()
        if node not in found:
            found[node] = None
            results = [r for u in node.users if is_region(u) for r in u.users]
            stack += [u for u in (*node.users, *results) if source(u) is node]
    return list(found)


def settle(written: Any, value: Value, c: AtenCall, take: Taken) -> None:
    """Records `value` as the new value of `written`, of the owner of its memory and of the views
    between them in the translator's `env`; calls `take` on other views that are read later."""
    path = path_to_owner(written)
    made: Any = value
    c.t.env[written] = made
    for view, whole in pairwise(path):
        made = c.t.env[whole] = _whole(c, c.t.env[whole], view, made)
    for node in _others(path[-1], c.node, path, c.t.order):
        take(node)


def _whole(c: AtenCall, before: Any, view: Any, value: Any) -> Any:
    """Returns a base's new value, from its old one `before` and the view's new one `value`."""
    stem = _stem(view)
    if view.target is operator.getitem:
        return [value if i == view.args[1] else x for i, x in enumerate(before)]
    if stem in _PARTS:
        dim = _argument(view, "dim") % type_of(before).rank
        pieces = [c.b.unsqueeze(x, [dim]) for x in value] if stem == "unbind" else value
        return c.b.Concat(*pieces, axis=dim) if len(pieces) > 1 else pieces[0]
    if stem in _TURNED:
        # distinct sizes show where each dim goes
        sizes = torch.empty(*range(2, 2 + type_of(before).rank), device="meta")
        order = [n - 2 for n in view.target(sizes, *view.args[1:], **view.kwargs).shape]
        return c.b.transpose(value, [order.index(d) for d in range(len(order))])
    if stem in _WINDOWS:
        return _written(c, before, view, value)
    return value if writes(view.target) else c.b.reshape(value, type_of(before).shape)


def _written(c: AtenCall, whole: Value, window: Any, value: Value) -> Value:
    """Returns `whole` with `value` in place of its part that `window` shows."""
    stem = _stem(window)
    names = {
        "slice": ("dim", "start", "end", "step"),
        "select": ("dim", "index"),
        "narrow": ("dim", "start", "length"),
        "diagonal": ("offset", "dim1", "dim2"),
    }
    given = [c.t.size_of_argument(n) for n in (_argument(window, name) for name in names[stem])]
    if stem == "narrow":
        dim, start, length = given
        size = type_of(whole).shape[dim]
        first, _ = c.bounds(size, start, None)
        stem, given = "slice", [dim, first, first + length, 1]
    return TABLE[f"{stem}_scatter.default"](c, whole, value, *given)


def _argument(node: Any, name: str) -> Any:
    """Returns an op's argument of this name, or its default."""
    arguments = node.target._schema.arguments
    i = next(i for i, a in enumerate(arguments) if a.name == name)
    return node.args[i] if i < len(node.args) else node.kwargs.get(name, arguments[i].default_value)


def _stem(node: Any) -> str:
    """`aten.squeeze.dims` -> `squeeze`."""
    named = isinstance(node.target, torch._ops.OpOverload)
    return node.target._schema.name.split("::")[1].rstrip("_") if named else ""
