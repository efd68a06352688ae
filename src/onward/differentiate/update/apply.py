"""`p', slot'... = Update(p, g, slot..., hyperparameter..., step, scale)` for each parameter."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from onward.differentiate.update.gradients import Gradients
from onward.differentiate.update.recipe import Recipe, UpdateGroup
from onward.graph.graph import Graph, Role, Value, type_of
from onward.graph.ops.random import seed_type
from onward.graph.signature import Hyperparameter, Slot
from onward.graph.types import DType, Type


def apply(gradients: Gradients, recipe: Recipe) -> None:
    """Adds the updates. New inputs: the clocks that the groups name, the hyperparameters of each
    group, the state tensors. New outputs: the next value of every parameter and state tensor."""
    graph = gradients.graph
    clocks = {
        clock: graph.input(f"step.{clock}", Type(DType.INT64, ()), Role.HYPER)
        for clock in sorted({g.clock for g in recipe.groups})
    }
    hyper: dict[int, dict[Hyperparameter, Value]] = {}
    optimizers = {g.index: g.optimizer for g in recipe.groups}
    for index, optimizer in sorted(optimizers.items()):
        hyper[index] = {
            Hyperparameter(index, name): graph.input(
                f"{name}.{index}", Type(DType.DOUBLE, ()), Role.HYPER
            )
            for name in optimizer.hyperparameters
        }
    updated: dict[str, str] = {}
    parameters = [name for group in recipe.groups for name in group.parameters]
    found = {name: graph.find_input(name) for name in parameters}
    slots: dict[Slot, str] = {}
    scales: dict[bool, Value | None] = {False: gradients.scale}
    for group in recipe.groups:
        scalars = [*hyper[group.index].values(), clocks[group.clock]]
        if _drawn(group):
            scalars.append(_seed(graph))
        if group.maximize not in scales:
            scales[True] = _negative(gradients)
        scale = scales[group.maximize]
        if scale is not None:
            scalars.append(scale)
        for name in group.parameters:
            p, g = found[name], gradients.of[name]
            types = group.optimizer.tensors(group.form, type_of(p))
            kept: dict[str, Value] = {}
            for slot in group.slots:
                kind = types[slot]
                assert kind is not None, f"{name} has no {slot}"
                kept[slot] = graph.input(f"{slot}.{name}", kind, Role.STATE)
            state = [kept.get(slot) for slot in types]  # None: this group does not keep the slot
            made = _update(gradients, group, name, [p, g, *state, *scalars])
            for value, source in zip(made, [p, *kept.values()], strict=True):
                held = source.name or ""
                updated[held] = graph.output(f"next.{held}", value, source)
            slots |= {Slot(name, slot): value.name or "" for slot, value in kept.items()}
    graph.signature = graph.signature.but(
        clocks={clock: value.name or "" for clock, value in clocks.items()},
        hyperparameters={k: v.name or "" for held in hyper.values() for k, v in held.items()},
        slots=slots,
        updated=updated,
        offloaded=recipe.offloaded,
    )


def _drawn(group: UpdateGroup) -> bool:
    return bool(group.form) and group.optimizer.forms[group.form].drawn


def _negative(gradients: Gradients) -> Value:
    """The factor of gradients in a group that maximizes the loss."""
    b, scale = gradients.builder, gradients.scale
    return b.scalar(-1.0, DType.FLOAT) if scale is None else b.Neg(scale)


def _seed(graph: Graph) -> Value:
    """The step's seed; a new input if the forward draws nothing."""
    name = graph.signature.seed
    if name is not None:
        return graph.find_input(name)
    seed = graph.input("seed", seed_type(), Role.RANDOM)
    graph.signature = graph.signature.but(seed=seed.name)
    return seed


def _update(
    gradients: Gradients, group: UpdateGroup, name: str, inputs: Sequence[Value | None]
) -> tuple[Value, ...]:
    record, attributes = group.optimizer, group.attributes
    op = record.forms[group.form].update if group.form else record.update
    # the parameter's name, which does not depend on the plan or on the order of groups
    if _drawn(group):
        attributes = {**attributes, "site": zlib.crc32(name.encode())}
    results = gradients.builder.node(op.name, inputs, attributes)
    return results if isinstance(results, tuple) else (results,)
