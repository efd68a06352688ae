"""If, Loop and Scan, where the branch taken and the number of iterations are known.

A branch that depends on data is refused. Computing both and selecting one would not do: the other
may give infinities, whose gradients are NaN even when multiplied by 0.
"""

from __future__ import annotations

import numpy as np
import onnx

from onward.graph.graph import Value, type_of
from onward.graph.importer.decomposition import NodeCall, Results, decomposition

STEPS = 1024  # most iterations of a loop that is unrolled


@decomposition("If")
def _if(c: NodeCall) -> Results:
    taken = bool(c.array(0).reshape(-1)[0])
    return c.subgraph(c.given["then_branch" if taken else "else_branch"], [])


@decomposition("Loop")
def _loop(c: NodeCall) -> Results:
    most = int(c.array(0).reshape(-1)[0]) if c.present(0) else None
    going = bool(c.array(1).reshape(-1)[0]) if c.present(1) else True
    body = c.given["body"]
    carried = list(c.inputs[2:])
    scanned: list[list[Value]] = [[] for _ in range(len(body.output) - 1 - len(carried))]
    if most is not None and going and _goes_on(body):
        c.room(min(most, STEPS) * len(body.node))
    step = 0
    while going and (most is None or step < most):
        if step >= STEPS:
            raise ValueError(f"it is a loop of more than {STEPS} iterations")
        counter, go = c.b.const(np.array(step, np.int64)), c.b.const(np.array(True))
        found = c.subgraph(body, [counter, go, *carried])
        going = _known(c, found[0])
        carried = list(found[1 : 1 + len(carried)])
        for held, value in zip(scanned, found[1 + len(carried) :], strict=True):
            held.append(value)
        step += 1
    if any(not held for held in scanned):
        raise ValueError("it is a loop without iterations that returns scan outputs")
    return [*carried, *[_stacked(c, held, 0) for held in scanned]]


def _goes_on(body: onnx.GraphProto) -> bool:
    """Whether the body hands the condition on that it is given, so that the count alone ends it."""
    if len(body.input) < 2 or not body.output:
        return False
    given, found = body.input[1].name, body.output[0].name
    nodes = [n for n in body.node if n.op_type == "Identity" and n.input and n.output]
    makers = {n.output[0]: n.input[0] for n in nodes}
    while found in makers:
        found = makers.pop(found)
    return found == given


def _known(c: NodeCall, condition: Value) -> bool:
    array = condition.const_value
    if array is None:
        raise ValueError("its loop condition depends on the data")
    return bool(array.numpy().reshape(-1)[0])


def _stacked(c: NodeCall, parts: list[Value], axis: int) -> Value:
    rank = type_of(parts[0]).rank + 1
    axis = axis % rank
    whole = [c.b.unsqueeze(x, [axis]) for x in parts]
    return whole[0] if len(whole) == 1 else c.b.Concat(*whole, axis=axis)


@decomposition("Scan")
def _scan(c: NodeCall) -> Results:
    body, count = c.given["body"], int(c.attr("num_scan_inputs"))
    states: list[Value | None] = list(c.inputs[: len(c.inputs) - count])
    first = len(states)
    axes = c.attr("scan_input_axes") or [0] * count
    backwards = c.attr("scan_input_directions") or [0] * count
    axes = [a % c.rank(first + i) for i, a in enumerate(axes)]
    steps = c.sizes(first)[axes[0]]
    if steps > STEPS:
        raise ValueError(f"it is a scan of more than {STEPS} iterations")
    c.room(steps * len(body.node))
    parts = [_apart(c, c.x(first + i), axes[i], steps) for i in range(count)]
    made: list[list[Value]] = [[] for _ in range(len(body.output) - first)]
    for step in range(steps):
        given = [
            p[steps - 1 - step if back else step] for p, back in zip(parts, backwards, strict=True)
        ]
        found = c.subgraph(body, [*states, *given])
        states = list(found[:first])
        for held, value in zip(made, found[first:], strict=True):
            held.append(value)
    out_axes = c.attr("scan_output_axes") or [0] * len(made)
    turned = c.attr("scan_output_directions") or [0] * len(made)
    stacks = [
        _stacked(c, held[::-1] if back else held, axis)
        for held, axis, back in zip(made, out_axes, turned, strict=True)
    ]
    return [*states, *stacks]


def _apart(c: NodeCall, x: Value, axis: int, steps: int) -> list[Value]:
    if steps == 1:
        return [c.b.squeeze(x, [axis])]
    parts = c.b.Split(x, c.b.ints([1] * steps), axis=axis)
    return [c.b.squeeze(part, [axis]) for part in parts]
