"""Loops over a sequence, in bodies of own ops: unrolled where the number of steps is known, else a
Scan of the ONNX standard, which other engines run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import onnx_ir as ir

from onward.graph.graph import Graph, Node, Role, Value, type_of
from onward.graph.types import DType

if TYPE_CHECKING:
    from onward.graph.build import Builder

# (builder, constants, carried values, this step's rows) -> (carried values, this step's results)
Step: TypeAlias = (
    "Callable[[Builder, list[Value], list[Value], list[Value]], tuple[list[Value], list[Value]]]"
)


def scan(
    b: Builder,
    step: Step,
    fixed: Sequence[Value],
    carried: Sequence[Value],
    parted: Sequence[Value],
    backwards: bool = False,
) -> tuple[list[Value], list[Value]]:
    """Runs a loop. Returns the carried values after the last step, and the results of all steps,
    stacked.

    Each step gets one row of each of `parted`, f[T,...]. backwards: the last row comes first.
    """
    count = type_of(parted[0]).shape[0]
    if isinstance(count, int):
        return _unrolled(b, step, fixed, carried, parted, range(count)[:: -1 if backwards else 1])
    turned = [_turned(b, x) if backwards else x for x in parted]
    ends, made = _as_node(b, step, fixed, carried, turned)
    return ends, [_turned(b, x) if backwards else x for x in made]


def _unrolled(
    b: Builder, step: Step, fixed: Sequence[Value], carried: Sequence[Value],
    parted: Sequence[Value], order: Sequence[int],
) -> tuple[list[Value], list[Value]]:  # fmt: skip
    on, rows = list(carried), {}
    for number in order:
        parts = [b.squeeze(b.slice(x, 0, number, number + 1), [0]) for x in parted]
        on, rows[number] = step(b, list(fixed), on, parts)
    stacks = []
    for made in zip(*(rows[number] for number in range(len(order))), strict=True):
        apart = [b.unsqueeze(x, [0]) for x in made]
        stacks.append(apart[0] if len(apart) == 1 else b.Concat(*apart, axis=0))
    return on, stacks


def _turned(b: Builder, x: Value) -> Value:
    """Reverses the rows of x."""
    count = type_of(x).shape[0]
    last = b.squeeze(b.size(count - 1), [0])
    y: Value = b.Gather(x, b.Sub(last, b.arange(count)), axis=0)
    return y


def _as_node(
    b: Builder, step: Step, fixed: Sequence[Value], carried: Sequence[Value],
    parted: Sequence[Value],
) -> tuple[list[Value], list[Value]]:  # fmt: skip
    """Writes the loop as a Scan node. The step's graph reads nothing from outside, so that
    constants are carried too."""
    inner = Graph("step")
    rows = [type_of(x).with_shape(type_of(x).shape[1:]) for x in parted]
    types = [*map(type_of, (*fixed, *carried)), *rows]
    given = [inner.input(f"s{i}", type, Role.BATCH) for i, type in enumerate(types)]
    held, on, parts = (
        given[: len(fixed)], given[len(fixed) : -len(rows)], given[-len(rows) :]
    )  # fmt: skip
    body = type(b)(inner)
    ends, made = step(body, held, on, parts)
    for value in (*held, *ends, *made):
        inner.ir.outputs.append(body.Identity(value))
    for value in list(inner.ir.initializers.values()):  # functions may not hold initializers
        tensor = value.const_value
        assert tensor is not None
        constant = Node("", "Constant", [], [ir.AttrTensor("value", tensor)], num_outputs=1)
        constant.outputs[0].name = f"{value.name}_c"
        inner.ir.insert_before(next(iter(inner.ir)), constant)
        inner.replace(value, constant.outputs[0])
        del inner.ir.initializers[value.name]  # type: ignore[arg-type]
    prefix = b.graph.fresh("step")  # names inside must differ from those outside
    for value in (*given, *(y for node in inner for y in node.outputs)):
        value.name = f"{prefix}_{value.name}"
    for value, held_type in zip(given, types, strict=True):
        value.type = ir.TensorType(DType(held_type.dtype))
        value.shape = ir.Shape([s if isinstance(s, int) else str(s) for s in held_type.shape])
    count = type_of(parted[0]).shape[0]
    outputs = [Value(name=b.graph.fresh("scan")) for _ in range(len(fixed) + len(ends) + len(made))]
    for value, source in zip(outputs, (*held, *ends), strict=False):
        value.meta["type"] = type_of(source)
    for value, source in zip(outputs[len(fixed) + len(ends) :], made, strict=True):
        value.meta["type"] = type_of(source).with_shape((count, *type_of(source).shape))
    attributes = [ir.AttrGraph("body", inner.ir), ir.AttrInt64("num_scan_inputs", len(parted))]
    b.graph.ir.append(
        Node(
            "", "Scan", [*fixed, *carried, *parted], attributes, outputs=outputs,
            name=b.graph.fresh("Scan"),
        )
    )  # fmt: skip
    behind = outputs[len(fixed) :]
    return behind[: len(ends)], behind[len(ends) :]


__all__ = ["Step", "scan"]
