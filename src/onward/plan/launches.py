"""Launches: a kernel call for each node that needs one, and copies."""

from __future__ import annotations

from dataclasses import replace

from onward.graph.graph import Node, attributes, type_of, where
from onward.graph.printer import node_text
from onward.graph.types import Size
from onward.kernels import KERNELS, KernelSpec
from onward.plan.placement import Buffers
from onward.plan.plan import PlannedLaunch
from onward.plan.select import open_spec
from onward.plan.storages import Access, Storages
from onward.plan.views import Layout

_COPY = KernelSpec("Contiguous", {}, (), ())


def copy(source: Layout, target: Layout, text: str, module: str, backward: bool) -> PlannedLaunch:
    """Makes the launch that copies one window to another."""
    return PlannedLaunch(
        KERNELS["Contiguous"][0], "Contiguous", module, {}, (source,), (target,), (), 0, backward,
        text, _COPY,
    )  # fmt: skip


def launches_of(access: Access, storages: Storages, buffers: Buffers) -> list[PlannedLaunch]:
    """Makes the launches of a node, in order, and the buffers of their operands."""
    if access.node in storages.views:
        return []
    if access.spec is None:
        return _concat(access, storages, buffers)
    return _kernel(access, access.spec, storages, buffers)


def _kernel(
    access: Access, spec: KernelSpec, storages: Storages, buffers: Buffers
) -> list[PlannedLaunch]:
    """Makes the kernel's launch, after copies of inputs that it needs contiguous."""
    node, kernel = access.node, storages.kernels[access.node]
    made: list[PlannedLaunch] = []
    inputs: list[Layout | None] = []
    for i, x in enumerate(node.inputs):
        layout = None if x is None else buffers.layout(x)
        if i in access.copies and x is not None and layout is not None:
            target = buffers.temporary(
                f"{x.name}.contiguous", type_of(x), access, f"contiguous copy for {node.op_type}"
            )
            made.append(_copy_for(node, layout, target, f"contiguous copy of %{x.name}"))
            layout = target
        inputs.append(layout)
    outputs = tuple([buffers.write(access, y) for y in node.outputs])
    scratch = tuple(
        [
            buffers.temporary(f"{node.name}.scratch", t, access, "kernel scratch")
            for t in access.scratch
        ]
    )
    made.append(
        PlannedLaunch(
            kernel, node.op_type, where(node), spec.attrs, tuple(inputs), outputs, scratch,
            kernel.workspace(spec), access.is_backward, node_text(node), open_spec(node),
            None if kernel.input_error is None else buffers.flag(),
        )
    )  # fmt: skip
    return made


def _concat(access: Access, storages: Storages, buffers: Buffers) -> list[PlannedLaunch]:
    """Makes copies of a Concat's inputs that are not already in place."""
    node, made = access.node, list[PlannedLaunch]()
    whole = buffers.write(access, node.outputs[0])
    dim = attributes(node)["axis"] % len(whole.shape)
    start: Size = 0
    for i, x in enumerate(node.inputs):
        assert x is not None
        layout = buffers.layout(x)
        if i not in storages.assigned.placed[node]:
            offset = whole.offset + start * whole.strides[dim]
            target = replace(whole, shape=layout.shape, offset=offset)
            made.append(_copy_for(node, layout, target, f"%{x.name} into its place in the Concat"))
        start = start + layout.shape[dim]
    return made


def _copy_for(node: Node, source: Layout, target: Layout, text: str) -> PlannedLaunch:
    return copy(source, target, text, where(node), bool(node.meta.get("backward")))
