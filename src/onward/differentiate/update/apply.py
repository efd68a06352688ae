"""`p', slot'... = Update(p, g, slot..., hyperparameter..., step, scale)` for each parameter."""

from __future__ import annotations

from collections.abc import Sequence

from onward.differentiate.update.gradients import Gradients
from onward.differentiate.update.recipe import Recipe, UpdateGroup
from onward.graph.graph import Role, Value, type_of
from onward.graph.signature import Hyperparameter, Slot
from onward.graph.types import DType, Type


def apply(gradients: Gradients, recipe: Recipe) -> None:
    """New inputs: a clock for each that the groups name, the hyperparameters of each group, the
    state tensors. New outputs: the next value of every parameter and state tensor."""
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
    for group in recipe.groups:
        scalars = [*hyper[group.index].values(), clocks[group.clock]]
        if gradients.scale is not None:
            scalars.append(gradients.scale)
        for name in group.parameters:
            p, g = found[name], gradients.of[name]
            kept = {
                slot: graph.input(f"{slot}.{name}", type_of(p), Role.STATE) for slot in group.slots
            }
            state = [kept.get(slot) for slot in group.optimizer.slots]  # None: it keeps none
            made = _update(gradients, group, [p, g, *state, *scalars])
            for value, source in zip(made, [p, *kept.values()], strict=True):
                held = source.name or ""
                updated[held] = graph.output(f"next.{held}", value, source)
            slots |= {Slot(name, slot): value.name or "" for slot, value in kept.items()}
    graph.signature = graph.signature.but(
        clocks={clock: value.name or "" for clock, value in clocks.items()},
        hyperparameters={k: v.name or "" for held in hyper.values() for k, v in held.items()},
        slots=slots,
        updated=updated,
    )


def _update(
    gradients: Gradients, group: UpdateGroup, inputs: Sequence[Value | None]
) -> tuple[Value, ...]:
    results = gradients.builder.node(group.optimizer.update.name, inputs, group.attributes)
    return results if isinstance(results, tuple) else (results,)
