"""`x * cos + rotated(x) * sin  =>  Rotary(x, cos, sin)`.

rotated(x) is `Concat(-x2, x1)` of x's halves, or the same of each pair of neighbours, stacked and
flattened. Where only the first features are rotated and a Concat appends the others, the op takes
all features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Value, attributes, content_of, type_of
from onward.rewrite.context import Context
from onward.rewrite.dead_code_elimination import dead_code_elimination

# A value as part of another's last dim: (source, first index, length, step).
Part = tuple[Value, int, int, int]


def rotary(graph: Graph, context: Context) -> int:
    edits = 0
    for node in list(graph):
        found = _turned(node)
        if found is None:
            continue
        x, interleaved = found
        sums = list(_sums(node.outputs[0], x))
        if not sums:
            context.missed(
                node,
                "Rotary",
                "the rotated half times the sine is not added to a product with the cosine",
            )
        for last, cos, sin in sums:
            whole, place = _beyond(x, last)
            shape, rank = type_of(cos).shape, type_of(whole).rank
            shape = (*[1] * (rank - len(shape)), *shape)
            attrs = {"interleaved": int(interleaved), "transposed": 0}
            angle = type_of(cos).with_shape(shape)
            if not context.takes(last, "Rotary", [whole, angle, angle], attrs):
                continue
            b = Builder.at(graph, place)
            angles = [b.reshape(v, shape) for v in (cos, sin)]
            graph.replace(place.outputs[0], b.Rotary(whole, *angles, **attrs))
            edits += 1
    if edits:
        dead_code_elimination(graph)  # nodes left of the rotation would count as readers
    return edits


def _part(value: Value | None) -> Part | None:
    node = value.producer() if value is not None else None
    if value is None or node is None or node.inputs[0] is None:
        return None
    x, size = node.inputs[0], type_of(value).shape[-1:]
    last = type_of(x).rank - 1
    if not size or not isinstance(size[0], int):
        return None
    match node.op_type:
        case "Slice":
            start, axes, steps = (
                content_of(v) for v in (node.inputs[1], *[*node.inputs, None, None][3:5])
            )
            if axes not in ((last,), (-1,)) or start is None or not isinstance(start[0], int):
                return None
            step = (1,) if steps is None else steps
            whole = type_of(x).shape[-1]
            if start[0] < 0 or not isinstance(step[0], int) or not isinstance(whole, int):
                return None
            return x, start[0], size[0], step[0]
        case "Split":
            if attributes(node).get("axis", 0) % (last + 1) != last:
                return None
            before = [type_of(y).shape[-1] for y in node.outputs[: node.outputs.index(value)]]
            if not all(isinstance(n, int) for n in before):
                return None
            return x, sum(n for n in before if isinstance(n, int)), size[0], 1
        case "Gather":
            at = content_of(node.inputs[1])
            if attributes(node).get("axis", 0) % (last + 1) != last or not at or len(at) < 1:
                return None
            if not all(isinstance(n, int) for n in at):
                return None
            numbers = [n for n in at if isinstance(n, int)]
            step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
            counted = list(range(numbers[0], numbers[0] + step * len(numbers), step or 1))
            return (x, numbers[0], len(numbers), step) if numbers == counted else None
        case _:
            return None


def _turned(node: Node) -> tuple[Value, bool] | None:
    """The value that the node rotates, and whether by pairs of neighbours; None for other nodes."""
    if node.op_type == "Concat":
        axis, rank = int(attributes(node)["axis"]), type_of(node.outputs[0]).rank
        x = _of_parts(node.inputs, 1) if axis % rank == rank - 1 else None
        return None if x is None else (x, False)
    if node.op_type != "Reshape" or node.inputs[0] is None:
        return None
    stack = node.inputs[0].producer()
    if stack is None or stack.op_type != "Concat":
        return None
    shape, rank = type_of(node.outputs[0]).shape, type_of(stack.outputs[0]).rank
    if int(attributes(stack)["axis"]) % rank != rank - 1 or rank != len(shape) + 1:
        return None
    x = _of_parts([_without_last(v) for v in stack.inputs], 2)
    return None if x is None or type_of(x).shape != shape else (x, True)


def _without_last(value: Value | None) -> Value | None:
    """The value to which a Reshape or the like added a last dim of size 1; None for others."""
    node = value.producer() if value is not None else None
    if node is None or node.op_type not in ("Unsqueeze", "Reshape") or node.inputs[0] is None:
        return None
    inner = node.inputs[0]
    return inner if type_of(value).shape == (*type_of(inner).shape, 1) else None


def _of_parts(given: Sequence[Value | None], step: int) -> Value | None:
    """The value x of parts `-x2, x1`: its halves (step 1) or alternating features (step 2)."""
    negative = given[0].producer() if len(given) == 2 and given[0] is not None else None
    if negative is None or negative.op_type != "Neg":
        return None
    second, first = _part(negative.inputs[0]), _part(given[1])
    if first is None or second is None or first[0] is not second[0] or first[2] != second[2]:
        return None
    x, half = first[0], first[2]
    apart = half if step == 1 else 1
    both = step if half > 1 else None  # a single feature shows no step
    fits = first[1] == 0 and second[1] == apart and type_of(x).shape[-1] == 2 * half
    return x if fits and all(both in (None, part[3]) for part in (first, second)) else None


def _sums(turned: Value, x: Value) -> Iterator[tuple[Node, Value, Value]]:
    """Each sum `x * cos + rotated * sin`, with its cos and sin."""
    for product in turned.consumers():
        sin = _other(product, turned) if product.op_type == "Mul" else None
        for last in product.outputs[0].consumers() if sin is not None else ():
            term = _other(last, product.outputs[0]) if last.op_type == "Add" else None
            scaled = term.producer() if term is not None else None
            cos = _other(scaled, x) if scaled is not None and scaled.op_type == "Mul" else None
            if cos is None or sin is None:
                continue
            width, of_x = type_of(x).shape[-1:], type_of(last.outputs[0]) == type_of(x)
            if of_x and type_of(cos) == type_of(sin) and type_of(cos).shape[-1:] == width:
                yield last, cos, sin


def _other(node: Node, value: Value) -> Value | None:
    """The other operand of a binary node."""
    first, second = node.inputs
    return second if first is value else first if second is value else None


def _beyond(x: Value, last: Node) -> tuple[Value, Node]:
    """If x is only the first features of a value, and a Concat appends the others to the sum: that
    value and the Concat. Otherwise x and the sum itself."""
    part, y = _part(x), last.outputs[0]
    readers = list(y.consumers())
    if part is None or part[1] != 0 or part[3] != 1 or len(readers) != 1:
        return x, last
    whole, _, turns, _ = part
    joined = readers[0]
    if joined.op_type != "Concat" or len(joined.inputs) != 2 or joined.inputs[0] is not y:
        return x, last
    rest = _part(joined.inputs[1])
    fits = type_of(joined.outputs[0]) == type_of(whole)
    if not fits or rest is None or rest[0] is not whole or rest[1] != turns or rest[3] != 1:
        return x, last
    return whole, joined
