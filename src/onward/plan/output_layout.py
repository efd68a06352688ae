"""Output layout assignment: a kernel writes a value in the layout that its reader needs, which
saves the copy of a later transpose or concatenation.

`Reshape(Transpose(y))` copies a contiguous y, but not a y with strides that make the result
contiguous. `Concat(a, b, c)` copies nothing when a, b and c are windows of one buffer. Only outputs
that kernels declare `strided` get such layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from onward.graph.graph import Node, Value, attributes, type_of
from onward.graph.ops import named
from onward.graph.types import Shape, Size
from onward.kernels import Kernel
from onward.plan.views import Layout, contiguous, reshape_strides

_RESHAPES = named("reshapes")


@dataclass(frozen=True)
class AssignedLayout:
    """A window of the contiguous memory of `owner`; the layout's buffer is -1."""

    owner: Value
    layout: Layout


@dataclass
class OutputLayouts:
    """The assigned layouts. of: by value. placed: the inputs of each Concat that are written in
    place."""

    of: dict[Value, AssignedLayout] = field(default_factory=dict)
    placed: dict[Node, set[int]] = field(default_factory=dict)


def assign_output_layouts(
    nodes: Sequence[Node], kernels: Mapping[Node, Kernel], outputs: set[Value]
) -> OutputLayouts:
    """Assigns windows to outputs that kernels can write with strides."""
    found = OutputLayouts()
    for node in nodes:
        for i in kernels[node].strided if node in kernels else ():
            value = node.outputs[i]
            path: list[tuple[Node, int]] = []
            assigned = _assigned(value, outputs, path, kernels)
            if assigned is None or _ordinary(assigned):
                continue
            strides = assigned.layout.strides
            if type_of(value).rank and strides[-1] != 1 and assigned.layout.shape[-1] != 1:
                continue
            found.of[value] = assigned
            for concat, index in path:
                found.placed.setdefault(concat, set()).add(index)
                whole = _assigned(concat.outputs[0], outputs, [], kernels)
                found.of[concat.outputs[0]] = whole or _itself(concat.outputs[0])
    return found


def _itself(value: Value) -> AssignedLayout:
    return AssignedLayout(value, contiguous(-1, type_of(value)))


def _ordinary(assigned: AssignedLayout) -> bool:
    """Whether a window is the whole memory of its owner, contiguous, so that nothing is gained."""
    whole = contiguous(-1, type_of(assigned.owner))
    return assigned.layout.is_contiguous and assigned.layout.size == whole.size


def _assigned(
    value: Value,
    outputs: set[Value],
    path: list[tuple[Node, int]],
    kernels: Mapping[Node, Kernel],
) -> AssignedLayout | None:
    """The window of `value` that saves one of its readers a copy; None where there is none. All
    other readers must accept strides."""
    if value in outputs:
        return None
    uses = list(value.uses())
    for use in uses:
        others = [other for other in uses if other is not use]
        if all(_reads_strides(other.node, other.idx, kernels) for other in others):
            steps: list[tuple[Node, int]] = []
            assigned = _assigned_by(use.node, use.idx, value, outputs, steps, kernels)
            # an input of a Concat may have one reader only
            if assigned is not None and not (others and steps):
                path += steps
                return assigned
    return None


def _reads_strides(node: Node, index: int, kernels: Mapping[Node, Kernel]) -> bool:
    kernel = kernels.get(node)
    return kernel is not None and kernel.contiguous is not None and index not in kernel.contiguous


def _assigned_by(
    node: Node,
    index: int,
    value: Value,
    outputs: set[Value],
    path: list[tuple[Node, int]],
    kernels: Mapping[Node, Kernel],
) -> AssignedLayout | None:
    made = node.outputs[0]
    moves = index == 0 and node.op_type in ("Transpose", *_RESHAPES)
    if made in outputs or not (moves or node.op_type == "Concat"):
        return None  # check first, to spare the search behind ops that make no window
    shape = contiguous(-1, type_of(value)).shape
    after = _assigned(made, outputs, path, kernels)
    if node.op_type == "Concat":
        whole = after or _itself(made)
        dim = attributes(node)["axis"] % len(shape)
        before = [x for x in node.inputs[:index] if x is not None]
        start: Size = 0
        for x in before:
            start = start + type_of(x).shape[dim]
        offset = whole.layout.offset + start * whole.layout.strides[dim]
        path.append((node, index))
        return _window(whole, shape, whole.layout.strides, offset)
    if node.op_type == "Transpose" and after is not None:
        perm = attributes(node).get("perm") or list(reversed(range(len(shape))))
        strides = tuple(after.layout.strides[perm.index(i)] for i in range(len(shape)))
        return _window(after, shape, strides, after.layout.offset)
    if node.op_type in _RESHAPES:
        after = after or _itself(made)
        back = reshape_strides(after.layout.shape, after.layout.strides, shape)
        if back is not None:
            return _window(after, shape, back, after.layout.offset)
    return None


def _window(within: AssignedLayout, shape: Shape, strides: Shape, offset: Size) -> AssignedLayout:
    """A window of the memory that `within` is a window of."""
    return AssignedLayout(within.owner, Layout(-1, within.layout.dtype, shape, strides, offset))
