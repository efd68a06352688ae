"""Each kernel that takes a call, and the op's body, on the call's operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict

import torch

from onward.execute import Executable, Memory
from onward.graph.build import Builder, inline
from onward.graph.graph import ONWARD, Graph, Role, Value
from onward.graph.ops import OWN
from onward.graph.types import Type, value
from onward.plan import make_plan
from suite.arithmetic import causal_share, op_bytes, op_flops
from suite.kernel_calls import Call
from suite.kernel_table import Kernel, KernelArguments, applicable, torch_dtype, watched
from suite.losses import worst
from suite.timing import Timed, timed

# ---- what a call costs in bytes and in arithmetic


def _bytes(call: Call) -> int:
    spec = call.spec
    return op_bytes(spec.op, spec.inputs, spec.outputs, spec.attrs)


def needed_flops(call: Call) -> float:
    """FLOPs of the op's matrix products; for causal attention only those of scores that the mask
    leaves."""
    spec = call.spec
    total = op_flops(spec.op, spec.inputs, spec.outputs, spec.attrs)
    scores = spec.inputs[0]
    if spec.attrs.get("is_causal") and scores is not None and scores.rank > 1:
        return total * causal_share(value(scores.shape[-2]))
    return float(total)


# ---- running


def run_kernel(call: Call, kernel: Kernel, seconds: float) -> tuple[Timed, list[torch.Tensor]]:
    """A kernel's time, and its outputs on fresh inputs."""
    inputs = [
        x if x is None or not (kernel.contiguous is None or i in kernel.contiguous)
        else x.contiguous()  # the plan copies it before the launch
        for i, x in enumerate(call.tensors())
    ]  # fmt: skip
    rights = {o: i for o, i in call.shares if (o, i) in kernel.inplace}
    outputs: list[torch.Tensor] = []
    for o, type in enumerate(call.spec.outputs):
        shared = inputs[rights[o]] if o in rights else None
        place = call.outputs[o].empty().zero_() if o in kernel.strided else _zeros(type)
        outputs.append(place if shared is None else shared)
    saved = [(x, x.clone()) for i in rights.values() if (x := inputs[i]) is not None]

    def restore() -> None:
        for x, kept in saved:
            x.copy_(kept)

    scratch = [_zeros(t) for t in kernel.scratch(call.spec)]
    with torch.no_grad():
        launch = kernel.bind(KernelArguments(call.spec.attrs, inputs, outputs, scratch))
        launch()
        results = [y.clone() for y in outputs]
        return timed(launch, restore if saved else None, seconds), results


def run_body(call: Call, seconds: float) -> tuple[Timed, list[torch.Tensor]]:
    """The op's body, planned and run as it would be inside a step; nothing is rewritten."""
    graph = _single(call)
    inline(graph, next(n for n in graph if n.domain == ONWARD))
    with watched() as bound:
        plan = make_plan(graph, {})
        given = {f"x{i}": x.contiguous() for i, x in enumerate(call.tensors()) if x is not None}
        owned = {name: x for name, x in given.items() if name in plan.inputs}
        executable = Executable(plan, Memory(torch.device("cpu")), owned)
        executable.bind()

    def launch() -> None:
        for item in bound:
            item.launch()

    with torch.no_grad():
        launch()
        results = [executable.output(name) for name in graph.outputs]
        return timed(launch, None, seconds), results


def _single(call: Call) -> Graph:
    """A graph of this one call, inputs `x0`, `x1`, ..."""
    graph = Graph(call.spec.op)
    values: list[Value | None] = [
        None if type is None else graph.input(f"x{i}", type, Role.BATCH)
        for i, type in enumerate(call.spec.inputs)
    ]
    made = Builder(graph).node(call.spec.op, values, call.spec.attrs)
    outputs = list(made) if isinstance(made, tuple) else [made]
    graph.outputs = {f"y{i}": y for i, y in enumerate(outputs)}
    return graph


def _zeros(type: Type) -> torch.Tensor:
    return torch.zeros([value(n) for n in type.shape], dtype=torch_dtype(type.dtype))


def difference(have: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> float:
    """The largest difference of any output, relative to that output's largest element."""
    found = [0.0]
    for y, z in zip(have, want, strict=True):
        if y.is_floating_point() and y.numel():
            size = float(z.abs().max()) or 1.0
            found.append(float((y - z).abs().max()) / size)
        elif not torch.equal(y, z):
            found.append(math.inf)
    return worst(found)


def measure_call(call: Call, seconds: float) -> None:
    """Times every kernel that takes the call, the plan's first, and the body; fills `results`."""
    moved, arithmetic = _bytes(call), needed_flops(call)
    first: list[torch.Tensor] | None = None
    ways: list[tuple[str, Callable[[], tuple[Timed, list[torch.Tensor]]]]] = [
        (kernel.name, lambda kernel=kernel: run_kernel(call, kernel, seconds))
        for kernel in applicable(call.spec, first=call.kernel)
    ]
    if call.spec.op in OWN:
        ways.append(("body", lambda: run_body(call, seconds)))
    for name, way in ways:
        try:
            took, outputs = way()
        except Exception as error:  # one failing kernel is a row of the table, not the end
            call.results.append({"kernel": name, "error": f"{type(error).__name__}: {error}"})
            continue
        first = outputs if first is None else first
        call.results.append(
            {
                "kernel": name, **asdict(took), "bytes": moved, "flops": arithmetic,
                "bytes_per_s": moved / took.best, "flops_per_s": arithmetic / took.best,
                "difference": difference(outputs, first),
            }
        )  # fmt: skip
