"""Rules of ops that work along some dims, and of their gradients, along the dims of rows."""

from __future__ import annotations

from collections.abc import Iterator

from onward.distribute.tensor.sharding import PARTIAL, REPLICATED, Sharding, split
from onward.distribute.tensor.ways import ShardedCall, Way, way_rule, worked_along
from onward.graph.types import Type


def _draws(call: ShardedCall) -> bool:
    """Whether the call has dropout inside, whose masks know the places of rows in the whole."""
    return float(call.attrs.get("ratio", 0.0)) > 0.0


def _rows(t: Type, like: Type, found: Sharding) -> Sharding:
    """The sharding of an operand that has the dims of `like`, or sizes of 1 in their place, or is
    one for all rows."""
    if t.rank != like.rank or t.shape[found.dim or 0] == 1:
        return REPLICATED
    return found


@way_rule(
    "Softmax", "LogSoftmax", "LayerNormalization", "RMSNorm", "Rotary", "AddLayerNormalization",
    "AddRMSNorm",
)  # fmt: skip
def _by_rows(call: ShardedCall) -> Iterator[Way]:
    x, along = call.type(), worked_along(call.node)
    if along is None or _draws(call):
        return
    for found in call.splits(x):
        if found.dim not in along:
            operands = {i: _rows(call.type(i), x, found)
                        for i in range(call.number) if call.present(i)}  # fmt: skip
            yield Way(call.inputs(operands), tuple(_rows(y, x, found) for y in call.results))


# the place of x, or of the residual sum, among the inputs of a norm's gradient
_NORMED = {
    "LayerNormalizationGrad": 1, "RMSNormGrad": 1, "AddLayerNormalizationGrad": 2,
    "AddRMSNormGrad": 2,
}  # fmt: skip


@way_rule(*_NORMED)
def _gradient(call: ShardedCall) -> Iterator[Way]:
    """Rows of dx; each rank's rows give a term of the gradients of scale and bias."""
    at = _NORMED[call.node.op_type]
    x = call.type(at)
    axis = int(call.attrs.get("axis", -1)) % x.rank
    if _draws(call) or x.rank < 2:
        return
    for found in call.splits(x):
        if found.dim is None or found.dim >= axis:
            continue
        operands = {i: _rows(call.type(i), x, found)
                    for i in range(call.number) if call.present(i) and i != at + 1}  # fmt: skip
        made = [found, *(PARTIAL for _ in call.results[1:])]
        if "Add" in call.node.op_type and len(call.results) > _sums(call):
            made[-1] = found  # dx beside dresidual
        yield Way(call.inputs(operands), tuple(made))


def _sums(call: ShardedCall) -> int:
    """The number of results without dx: dresidual, and the gradients of scale and bias."""
    return 3 if "Layer" in call.node.op_type else 2


@way_rule("BiasActivationGrad")
def _bias_gradient(call: ShardedCall) -> Iterator[Way]:
    x = call.type(1)
    for found in call.splits(x):
        last = found.dim == x.rank - 1
        operands = {0: found, 1: found}
        if call.present(2):
            operands[2] = split(0, found.groups) if last else REPLICATED
        yield Way(call.inputs(operands), (found, split(0, found.groups) if last else PARTIAL))
