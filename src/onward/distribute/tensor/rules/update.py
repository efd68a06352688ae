"""Rules of optimizers' updates: of elementwise ones a part of the parameter, with that of its
gradient and of its state."""

from __future__ import annotations

from collections.abc import Iterator

from onward.distribute.tensor.sharding import REPLICATED
from onward.distribute.tensor.ways import ShardedCall, Way, way_rule
from onward.graph.ops.optimizers import OPTIMIZERS, Optimizer


def _by_element(optimizer: Optimizer) -> set[str]:
    """The update ops of an optimizer that a part of a parameter may be given to. State in blocks,
    and random bits that go by the number of an element, are of whole parameters."""
    forms = [form for form in optimizer.forms.values() if form.block == 1 and not form.drawn]
    found = [optimizer.update, *(form.update for form in forms)] if optimizer.elementwise else []
    return {op.name for op in found}


_ELEMENTWISE = sorted(set[str]().union(*map(_by_element, OPTIMIZERS.values())))


@way_rule(*_ELEMENTWISE)
def _update(call: ShardedCall) -> Iterator[Way]:
    """A part like each other tensor of the parameter's shape; numbers are whole."""
    p = call.type(0)
    present = [i for i in range(call.number) if call.present(i)]
    types = [*(call.type(i) for i in present), *call.results]
    if any(t.rank and t.shape != p.shape for t in types):
        return
    for found in call.splits(p):
        operands = {i: found for i in present if call.type(i).rank}
        made = tuple(found if t.rank else REPLICATED for t in call.results)
        yield Way(call.inputs(operands), made)
