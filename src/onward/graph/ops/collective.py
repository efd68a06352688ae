"""Collectives: the ops by which the ranks of a mesh exchange tensors along one of its axes.

Each has two halves. A start begins the exchange, and its results may not be read yet. The one
`CollectiveWait` of its number ends it and returns the results. Between the two the memory of both
is in use, which a plan sees since the wait reads the results of the start, and those of its inputs
that the exchange reads until its end.

    y = AllReduceStart(x)      y' = CollectiveWait(y)       y' = x of rank 0 + x of rank 1 + ...
    y = AllGatherStart(x)      y' = CollectiveWait(y, x)    y' = x of rank 0, x of rank 1, ...
    y = AllGatherStart(x, into)   the same in the shape of `into`, and in its memory where that ends
    y = ReduceScatterStart(x)  y' = CollectiveWait(y, x)    y' = this rank's part of the sum
    y = AllToAllStart(x)       y' = CollectiveWait(y, x)    y' = this rank's part of each x
    y = BroadcastStart(x)      y' = CollectiveWait(y)       y' = x of the rank `root`
    y = ExchangeStart(x)       y' = CollectiveWait(y, x)    y' = x of this rank's partner, or of the
                                                            rank before it in a ring
    y = SendStart(x)           y' = CollectiveWait(y, x)    x is with the rank `to`; y' is nothing
    y = ReceiveStart(shape)    y' = CollectiveWait(y)       y' = x of the rank `source`

Parts are along dim 0, equal in size, in the order of the ranks' coordinates along the axis. Every
rank must start the same collectives in the same order: `sequence` numbers them from 1, and
`plan/order.py` keeps that order. In a message, which is sent and received, and in an exchange with
a `partner`, two ranks take part alone: the numbers are those of the mesh, and a rank's own are some
of them. The result of a send is an output of the graph (`Signature.sent`), so that it is run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import onnx_ir as ir

from onward.errors import OnwardError
from onward.graph.graph import Graph, Node, Value, attributes, content_of
from onward.graph.ops.call import Call
from onward.graph.ops.record import Op
from onward.graph.types import DType, Type, product
from onward.mesh_sizes import AXES

if TYPE_CHECKING:
    from onward.graph.build import Builder

REDUCTIONS = ("sum", "max", "mean")
WAIT = "CollectiveWait"
# collectives of several tensors, whose results may lie in the memory of their inputs
IN_PLACE = frozenset({"AllReduceStart", "BroadcastStart"})
SEND, RECEIVE = "SendStart", "ReceiveStart"
MESSAGES = frozenset({SEND, RECEIVE})  # the two ends of a message from one rank to another
STARTS = (
    IN_PLACE | MESSAGES
    | {"ReduceScatterStart", "AllGatherStart", "AllToAllStart", "ExchangeStart"}
)  # fmt: skip
REDUCING = frozenset({"AllReduceStart", "ReduceScatterStart"})
MOST = 64  # tensors of one collective
ALONE = 1 << 20  # bytes of a tensor from which on a sum of its own costs less than a copy


def is_summed_alone(tensors: int, nbytes: int, device: str) -> bool:
    """Whether one of so many tensors is summed in an exchange of its own. NCCL takes a list without
    a copy."""
    return tensors == 1 or (device == "cpu" and nbytes >= ALONE)


def is_collective(node: Node) -> bool:
    """Whether a node is a half of a collective."""
    return node.op_type == WAIT or node.op_type in STARTS


def sequence_of(node: Node) -> int:
    """The number of a collective among those of its graph, from 1."""
    return int(attributes(node)["sequence"])


def held_inputs(start: Node) -> list[ir.Value | None]:
    """The inputs of a start that the exchange reads until its end."""
    return [] if start.op_type in IN_PLACE or start.op_type == RECEIVE else list(start.inputs[:1])


def wait_of(start: Node) -> Node:
    """The wait of a start, in a graph whose halves are whole."""
    return next(iter(start.outputs[0].consumers()))


def start_of(wait: Node) -> Node:
    """The start of a wait, in a graph whose halves are whole."""
    start = None if wait.inputs[0] is None else wait.inputs[0].producer()
    assert start is not None, "a wait reads the results of its start"
    return start


def _refuse(b: Builder, inputs: list[Value | None], attrs: dict[str, Any]) -> list[Value]:
    raise OnwardError(
        f"the collective {attrs['sequence']} ({attrs['record']}) needs the other ranks along "
        f"{attrs['axis']}, and no other engine can run it: the graph of one rank is not portable; "
        "fix: export the step from a process without a mesh"
    )


def _exchanged(call: Call) -> list[Type]:
    """The types of the inputs, once attributes and types are known to fit."""
    attrs = call.attrs
    if attrs.get("axis") not in AXES:
        raise ValueError(f"{call.op_type}: the axis {attrs.get('axis')!r} is none of {AXES}")
    if int(attrs.get("size", 0)) < 2:
        raise ValueError(f"{call.op_type}: an axis of one rank has nothing to exchange")
    if int(attrs.get("sequence", 0)) < 1 or not attrs.get("record"):
        raise ValueError(f"{call.op_type}: it needs a number from 1, and a record of its purpose")
    found = [call.type(i) for i in range(len(call.inputs))]
    most = MOST if call.op_type in IN_PLACE else 2 if call.op_type == "AllGatherStart" else 1
    if not 1 <= len(found) <= most:
        raise ValueError(f"{call.op_type} takes 1 to {most} tensors, not {len(found)}")
    is_odd = any(t.dtype == DType.BOOL for t in found) and call.op_type not in MESSAGES
    if len({t.dtype for t in found}) > 1 or is_odd:
        raise ValueError(f"{call.op_type} takes tensors of one type of numbers")
    if call.op_type in REDUCING:
        reduction = attrs.get("reduction")
        if reduction not in REDUCTIONS:
            raise ValueError(f"{call.op_type}: reduction {reduction!r} is none of {REDUCTIONS}")
        if reduction == "mean" and not found[0].is_floating:
            raise ValueError(f"{call.op_type}: a mean of {found[0]}")
    elif call.op_type == "BroadcastStart" and not 0 <= int(attrs.get("root", -1)) < attrs["size"]:
        raise ValueError(f"{call.op_type}: root {attrs.get('root')} of {attrs['size']} ranks")
    return found


def _rows(call: Call, x: Type) -> int:
    """The rows of a tensor that is cut into a part for each rank."""
    size = int(call.attrs["size"])
    rows = x.shape[0] if x.rank else 1
    if not isinstance(rows, int) or rows % size:
        raise ValueError(f"{call.op_type}: {x} has no {size} equal parts along dim 0")
    return rows


def _scattered(call: Call) -> list[Type]:
    [x] = _exchanged(call)
    return [x.with_shape((_rows(call, x) // int(call.attrs["size"]), *x.shape[1:]))]


def _gathered(call: Call) -> list[Type]:
    x, *into = _exchanged(call)
    if not x.rank:
        raise ValueError(f"{call.op_type}: {x} has no dim 0 to gather along")
    whole = x.with_shape((x.shape[0] * int(call.attrs["size"]), *x.shape[1:]))
    if into and product(into[0].shape) != product(whole.shape):
        raise ValueError(f"{call.op_type}: {whole} has not the elements of {into[0]}")
    return into or [whole]


def _swapped(call: Call) -> list[Type]:
    [x] = _exchanged(call)
    _rows(call, x)
    return [x]


def _paired(call: Call) -> list[Type]:
    found = _exchanged(call)
    if "partner" in call.attrs:
        _other_rank(call, "partner")
        return found
    if "shift" in call.attrs:
        shift = call.attrs["shift"]
        if not isinstance(shift, int) or not 1 <= shift < int(call.attrs["size"]):
            raise ValueError(f"{call.op_type}: shift {shift} of {call.attrs['size']} ranks")
        return found
    size, distance = int(call.attrs["size"]), int(call.attrs.get("distance", 0))
    if distance < 1 or distance & (distance - 1) or size % (2 * distance):
        raise ValueError(
            f"{call.op_type}: at the distance {distance} some of {size} ranks have no partner"
        )
    return found


def _other_rank(call: Call, name: str) -> None:
    """Raises ValueError where an attribute is no coordinate of a rank."""
    other = call.attrs.get(name)
    if not isinstance(other, int) or not 0 <= other < int(call.attrs["size"]):
        raise ValueError(f"{call.op_type}: {name} {other} of {call.attrs['size']} ranks")


def _sent(call: Call) -> list[Type]:
    _exchanged(call)
    _other_rank(call, "to")
    return [Type(DType.INT32, (1,))]


def _received(call: Call) -> list[Type]:
    _exchanged(call)
    _other_rank(call, "source")
    shape = content_of(call.inputs[0])
    if shape is None:
        raise ValueError(f"{call.op_type}: its input must be a known shape")
    return [Type(DType(int(call.attrs["dtype"])), tuple(shape))]


def _waited(call: Call) -> list[Type]:
    start = None if not call.inputs or call.inputs[0] is None else call.inputs[0].producer()
    if start is None or start.op_type not in STARTS:
        raise ValueError(f"{WAIT}: its first input is no result of a start")
    return [call.type(i) for i in range(len(start.outputs))]


def broken_halves(graph: Graph) -> Iterator[str]:
    """Yields what is wrong with the collectives of a graph: a number used twice, a result of a
    start that anything but its one wait reads, a wait that lets go of an input too early."""
    numbers: dict[int, str] = {}
    outputs = graph.output_values()
    for node in graph:
        if node.op_type == WAIT:
            start = node.inputs[0].producer() if node.inputs and node.inputs[0] else None
            if start is None or start.op_type not in STARTS:
                yield f"{WAIT} {node.name} waits for no start"
        if node.op_type not in STARTS:
            continue
        number, name = sequence_of(node), f"{node.op_type} {node.name}"
        if number in numbers:
            yield f"{name} and {numbers[number]} have both the number {number}"
        numbers[number] = name
        readers = {reader for y in node.outputs for reader in y.consumers()}
        if len(readers) != 1 or any(y in outputs for y in node.outputs):
            yield f"{name} is not read by one wait alone"
            continue
        [wait] = readers
        if wait.op_type != WAIT or list(wait.inputs) != [*node.outputs, *held_inputs(node)]:
            yield f"{name} is read by {wait.op_type} {wait.name}, which is not its wait"
        elif sequence_of(wait) != number:
            yield f"{name} and its wait have the numbers {number} and {sequence_of(wait)}"


_ATTRIBUTES = (
    "`axis`: of the mesh. `size`: ranks along it, 2 or more. `sequence`: its number among the "
    "collectives of the graph. `record`: what is exchanged, and why."
)
_SUMMED = "`reduction`: sum, max or mean."

OPS = (
    Op(
        name="AllReduceStart",
        infer=_exchanged,
        body=_refuse,
        opaque=True,
        doc=f"y... = x... of all ranks, reduced, on every rank. {_SUMMED} {_ATTRIBUTES}",
    ),
    Op(
        name="ReduceScatterStart",
        infer=_scattered,
        body=_refuse,
        opaque=True,
        doc=f"y = this rank's part of x of all ranks, reduced. {_SUMMED} {_ATTRIBUTES}",
    ),
    Op(
        name="AllGatherStart",
        infer=_gathered,
        body=_refuse,
        opaque=True,
        doc="y = x of all ranks, one behind the other; with a second input `into`, in the shape of "
        "that and, where nothing reads it later, in its memory. `placed`: 1 where it starts no "
        f"earlier than the graph has it. {_ATTRIBUTES}",
    ),
    Op(
        name="AllToAllStart",
        infer=_swapped,
        body=_refuse,
        opaque=True,
        doc=f"y = this rank's part of x of each rank, one behind the other. {_ATTRIBUTES}",
    ),
    Op(
        name="BroadcastStart",
        infer=_exchanged,
        body=_refuse,
        opaque=True,
        doc=f"y... = x... of the rank with the coordinate `root`. {_ATTRIBUTES}",
    ),
    Op(
        name="ExchangeStart",
        infer=_paired,
        body=_refuse,
        opaque=True,
        doc="y = x of this rank's partner, whose coordinate differs in the bit `distance`, a power "
        "of two: at 1, ranks 0 and 1 are partners, at 2, ranks 0 and 2. Or of the rank with the "
        "coordinate `partner`, which has this rank as its own. Or round a ring: y = x of the rank "
        "`shift` before this one, whose own x goes to the rank `shift` behind it. `placed`: 1 "
        f"where it starts no earlier than the graph has it. {_ATTRIBUTES}",
    ),
    Op(
        name=SEND,
        infer=_sent,
        body=_refuse,
        opaque=True,
        doc="Sends x to the rank with the coordinate `to`, which receives it under the same "
        f"number. y: i32[1], whose number means nothing. {_ATTRIBUTES}",
    ),
    Op(
        name=RECEIVE,
        infer=_received,
        body=_refuse,
        opaque=True,
        doc="y = x of the rank with the coordinate `source`, of the shape i64[n] that is its "
        "input and the ONNX element type `dtype`. `placed`: 1 where it starts no earlier than the "
        f"graph has it. {_ATTRIBUTES}",
    ),
    Op(
        name=WAIT,
        infer=_waited,
        body=_refuse,
        opaque=True,
        doc="Inputs: the results of a start, then those of its inputs that the exchange reads "
        "until its end. Outputs: the results, once they have arrived. `axis`, `sequence` and "
        "`record` are those of the start.",
    ),
)

__all__ = [
    "IN_PLACE", "MESSAGES", "MOST", "RECEIVE", "REDUCTIONS", "SEND", "STARTS", "WAIT",
    "broken_halves", "held_inputs", "is_collective", "sequence_of", "start_of", "wait_of",
]  # fmt: skip
