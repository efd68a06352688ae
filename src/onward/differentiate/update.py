"""From gradients to a whole step: clipping, accumulation, optimizer updates, state pairs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.names import gradient_name
from onward.graph.types import DType, Type

NORM_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_ adds it to the norm before dividing


# the scalars that an update reads, by torch's names, in the op's order
HYPER = {
    "AdamUpdate": ("lr", "beta1", "beta2", "eps", "weight_decay"),
    "SGDUpdate": ("lr", "momentum", "dampening", "weight_decay"),
}


@dataclass(frozen=True)
class UpdateGroup:
    """Parameters that share an update rule and hyperparameters (a torch `param_group`).

    op: `AdamUpdate` or `SGDUpdate`; attrs: its attributes; slots: names of the state tensors a
    parameter has (`exp_avg`, ...), in the op's order. Hyperparameters are inputs: `lr.<index>` and
    so on. clock: which count of updates is the group's; the input is `step.<clock>`.
    """

    index: int
    parameters: tuple[str, ...]
    op: str
    attrs: dict[str, Any] = field(hash=False)
    slots: tuple[str, ...] = ()
    clock: int = 0


def state_name(parameter: str, slot: str) -> str:
    """The input that holds an optimizer's state tensor."""
    return f"{slot}.{parameter}"


def add_updates(
    graph: Graph,
    groups: Sequence[UpdateGroup],
    max_grad_norm: float | None = None,
    accumulate: bool = False,
    skip_nonfinite: bool = False,
) -> Graph:
    """A copy of a differentiated graph with updated parameters and state among its outputs.

    New inputs: `step.<clock>` (i64[], from 1), the hyperparameters `lr.<group>` and so on (f64[]),
    the state tensors and, with `accumulate`, one accumulator per parameter. New outputs:
    `next.<input>` with state pairs, and `grad_norm` where gradients are clipped. With `accumulate`
    there are also `accumulated.<parameter>`; a plan that asks for these alone is a micro-step
    without update. With `skip_nonfinite` the output `finite`, b[], says whether all gradients are:
    the updates are to be done where it is true.
    """
    graph = graph.clone()
    b = Builder(graph, module="optimizer", backward=True)
    # what the loss does not reach gets no update, as in torch, and its clock does not move
    reached = [g for g in groups if any(gradient_name(n) in graph.outputs for n in g.parameters)]
    steps = {
        clock: graph.input(f"step.{clock}", Type(DType.INT64, ()), Role.HYPER)
        for clock in sorted({g.clock for g in reached})
    }
    rules = {g.index: g.op for g in reached}
    hyper = {
        index: [graph.input(f"{h}.{index}", Type(DType.DOUBLE, ()), Role.HYPER) for h in HYPER[op]]
        for index, op in sorted(rules.items())
    }
    gradients: dict[str, Value] = {}
    for group in groups:
        for name in group.parameters:
            if gradient_name(name) in graph.outputs:
                gradients[name] = graph.outputs.pop(gradient_name(name))
    if accumulate:
        for name, g in gradients.items():
            held = graph.input(f"accumulator.{name}", type_of(g), Role.STATE)
            gradients[name] = b.Add(held, g)
            graph.outputs[f"accumulated.{name}"] = gradients[name]
            graph.state[f"accumulated.{name}"] = held
    scale: Value | None = None
    norm: Value | None = None
    if max_grad_norm is not None and gradients:
        norm = _global_norm(b, list(gradients.values()))
        graph.outputs["grad_norm"] = norm
        scale = b.Min(b.Div(max_grad_norm, b.Add(norm, NORM_EPS)), 1.0)
    if skip_nonfinite and gradients:
        graph.outputs["finite"] = b.AllFinite(norm, *gradients.values())
    for group in groups:
        for name in group.parameters:
            if name in gradients:
                scalars = [
                    *hyper[group.index],
                    steps[group.clock],
                    *([] if scale is None else [scale]),
                ]
                _update(graph, b, group, name, gradients[name], scalars)
    return graph


def _global_norm(b: Builder, gradients: list[Value]) -> Value:
    """The 2-norm of all gradients as one vector, f32[]: the norm of the norms, as in torch."""
    norms = [b.reshape(b.ReduceL2(g, keepdims=0), (1,)) for g in gradients]
    return b.ReduceL2(b.Concat(*norms, axis=0) if len(norms) > 1 else norms[0], keepdims=0)


def _update(
    graph: Graph, b: Builder, group: UpdateGroup, name: str, g: Value, scalars: Sequence[Value]
) -> None:
    p = graph.find_input(name)
    state = [graph.input(state_name(name, s), type_of(p), Role.STATE) for s in group.slots]
    results = b.node(group.op, [p, g, *(state or [None]), *scalars], group.attrs)
    outputs = results if isinstance(results, tuple) else (results,)
    for value, source in zip(outputs, [p, *state], strict=True):
        graph.outputs[f"next.{source.name}"] = value
        graph.state[f"next.{source.name}"] = source
