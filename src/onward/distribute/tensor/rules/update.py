"""Rules of optimizers' updates: of elementwise ones a part of the parameter, with that of its
gradient and of its state.

State in blocks is that of the part, which has to be whole blocks. Random bits go by the numbers of
elements within the parts of all ranks, one behind the other, which are those of the whole parameter
where it is cut along its first dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from onward.distribute.tensor.sharding import REPLICATED, split
from onward.distribute.tensor.ways import RankPlace, ShardedCall, Way, same_op, way_rule
from onward.graph.build import Builder
from onward.graph.graph import Node, Value, attributes, type_of
from onward.graph.ops.optimizers import OPTIMIZERS
from onward.graph.ops.optimizers.rounding import ROW

_ABLE = [optimizer for optimizer in OPTIMIZERS.values() if optimizer.elementwise]
_ELEMENTWISE = sorted({optimizer.update.name for optimizer in _ABLE})
_FORMS = {form.update.name: form for optimizer in _ABLE for form in optimizer.forms.values()}


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


@way_rule(*_FORMS)
def _update_in_form(call: ShardedCall) -> Iterator[Way]:
    """Parts of the parameter, its gradient and its moments; of numbers for each block as many as
    the part has."""
    p, form = call.type(0), _FORMS[call.node.op_type]
    held = range(2, 2 + len(form.tensors))
    for found in call.splits(p):
        in_blocks = any(call.type(i).shape != p.shape for i in held)
        if in_blocks and found.local(p, call.ranks).numel % form.block:
            continue
        parts = {i: found if call.type(i).shape == p.shape else split(0) for i in held}
        made = tuple(found if t.shape == p.shape else split(0) for t in call.results)
        yield Way(call.inputs({0: found, 1: found, **parts}), made, _numbered)


def _numbered(
    b: Builder, node: Node, inputs: list[Value | None], place: RankPlace
) -> Sequence[Value]:
    """The update of a part, whose elements are numbered behind those of the ranks before."""
    if "site" not in attributes(node):
        return same_op(b, node, inputs)
    rows = -(-type_of(inputs[0]).numel // ROW)  # a row shares a key, and is one part's
    return same_op(b, node, inputs, first=place.at * rows * ROW)
