"""Bytes of a step by kind: of its plan, of the model, and of copies returned to the user."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch

from onward.execute import Executable, ExecutableHalves
from onward.explanation.facts import (
    ARENA,
    KINDS,
    NOT_COUNTED,
    OFFLOADED,
    OWN_GRADIENTS,
    OWN_OPTIMIZER,
    OWN_STEP,
    StepMemory,
)
from onward.graph.ops.optimizers import OPTIMIZERS
from onward.memory_amounts import mib
from onward.plan import Layout, MemoryRegion, Plan
from onward.plan.arena import aligned

_ARENAS = (MemoryRegion.RESIDUAL, MemoryRegion.SCRATCH)


def model_bytes(model: torch.nn.Module, owned: Mapping[str, torch.Tensor]) -> int:
    """The bytes of parameters and buffers, shared ones once. owned: the graph's owned tensors, of
    which a step holds a copy if they are not contiguous."""
    held = {id(t): t for t in (*model.parameters(), *model.buffers(), *owned.values())}
    copies = [t for t in owned.values() if not t.is_contiguous()]
    return sum(t.numel() * t.itemsize for t in (*held.values(), *copies))


def step_memory(
    executable: Executable | ExecutableHalves,
    looks: Sequence[Plan],
    weights: int,
    optimizer: int | None = None,
) -> StepMemory:
    """The memory of a step on this plan.

    looks: plans that inspect the batch before it. weights: bytes of the model. optimizer: bytes of
    an optimizer's state that is in no plan, where they are known.
    """
    plan = executable.plan
    halves = isinstance(executable, ExecutableHalves)
    kinds = dict.fromkeys(KINDS, 0)
    kinds["weights"], kinds["optimizer"] = weights, optimizer or 0
    state = {plan.inputs[n].buffer for n in plan.signature.slots.values() if n in plan.inputs}
    sums = _accumulators(plan)
    for buffer in plan.buffers:
        if buffer.region is MemoryRegion.PERSISTENT:
            held = "optimizer" if buffer.index in state else "constants"
            held = "gradients" if buffer.index in sums else held
            kinds[held] += aligned(buffer.nbytes)
    kinds["optimizer"] += plan.resident
    alive = _alive(plan)
    totals = np.sum([alive[kind] for kind in ARENA], axis=0)
    fullest = int(totals.argmax()) if len(totals) else 0
    for kind in ARENA:
        kinds[kind] += int(alive[kind][fullest]) if len(totals) else 0
    kinds["gaps"] = plan.arena_bytes - (int(totals[fullest]) if len(totals) else 0)
    kinds["workspace"] = plan.workspace
    kinds["results"] += _bytes_of(plan, _results(plan))
    if halves:
        copied = [plan.signature.gradients[wrt] for wrt in executable.copied]
        kinds["gradients"] += _bytes_of(plan, copied)
    kinds["row counting"] = _looking(plan, looks, apart=halves)
    shown = {kind: tuple(map(int, alive[kind])) for kind in ARENA}
    more = [OWN_GRADIENTS, *([OWN_OPTIMIZER] if optimizer is None else [])] if halves else []
    if plan.signature.left_gradients:
        more.append(OWN_STEP)
    away = plan.sizes[MemoryRegion.OFFLOADED]
    if away:
        more.append(f"{mib(away)} {OFFLOADED}")
    return StepMemory(kinds, fullest, shown, plan.arena_bytes, (*NOT_COUNTED, *more))


def _results(plan: Plan) -> Iterable[str]:
    """The outputs returned to the user as copies."""
    signature = plan.signature
    named = [*signature.results.values(), signature.loss, signature.grad_norm]
    return dict.fromkeys(name for name in named if name in plan.outputs)


def _bytes_of(plan: Plan, names: Iterable[str | None]) -> int:
    return sum(_nbytes(plan.outputs[n]) for n in names if n is not None)


def _nbytes(layout: Layout) -> int:
    return aligned(layout.nbytes)


def _looking(plan: Plan, looks: Sequence[Plan], apart: bool) -> int:
    """The memory of plans that inspect the batch: their constants and, if the step's arena is a
    block (`apart`), an arena; otherwise they use the step's."""
    own = sum(look.sizes[MemoryRegion.PERSISTENT] for look in looks)
    largest = max((look.arena_bytes for look in looks), default=0)
    return own + (largest if apart else max(0, largest - plan.arena_bytes))


def _alive(plan: Plan) -> dict[str, np.ndarray]:
    """The bytes of the arena by kind, for each launch."""
    count = len(plan.launches)
    change = {kind: np.zeros(count + 1, dtype=np.int64) for kind in ARENA}
    gradients, results = _gradients(plan), {plan.outputs[n].buffer for n in _results(plan)}
    for buffer in plan.buffers:
        if buffer.region not in _ARENAS or not count:
            continue
        kind = "scratch"
        if buffer.index in gradients:
            kind = "gradients"
        elif buffer.purpose == "staged batch":
            kind = "batch"
        elif buffer.region is MemoryRegion.RESIDUAL:
            kind = "activations"
        elif buffer.index in results:
            kind = "results"
        change[kind][buffer.first] += aligned(buffer.nbytes)
        change[kind][min(buffer.last, count - 1) + 1] -= aligned(buffer.nbytes)
    return {kind: steps.cumsum()[:count] for kind, steps in change.items()}


def _accumulators(plan: Plan) -> set[int]:
    names = plan.signature.accumulators.values()
    return {plan.inputs[n].buffer for n in names if n in plan.inputs}


def _gradients(plan: Plan) -> set[int]:
    """The buffers of gradients with respect to parameters: those that halves return, updates read,
    or sums over micro-batches include."""
    shown = (*plan.signature.gradients.values(), *plan.signature.left_gradients.values())
    found = {plan.outputs[n].buffer for n in shown if n in plan.outputs}
    updates = {op.name for record in OPTIMIZERS.values() for op in record.updates}
    sums = _accumulators(plan)
    for launch in plan.launches:
        inputs = [x.buffer for x in launch.inputs if x is not None]
        if launch.op in updates:
            found.add(inputs[1])  # Update(parameter, gradient, state..., scalars...)
        elif launch.op == "Add" and any(y.buffer in sums for y in launch.outputs):
            found |= {i for i in inputs if i not in sums}
    return found


__all__ = ["model_bytes", "step_memory"]
