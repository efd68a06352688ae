"""The method by which ranks that have positions exchange what attention needs of other ranks.

    allgather   keys and values of all ranks on each (`attention_queries.py`)
    alltoall    positions for heads (`attention_exchange.py`)
    ring        keys and values in turn, from each rank to the next (`attention_ring.py`)

A call that does not take the method that is asked for has that of "auto", by H heads of queries, G
of keys and N ranks:

    alltoall    where ranks divide the heads and fewer bytes are passed, `4 H + 4 G < 6 G N`
    ring        else where what is gathered would be large beside a rank's queries, `G N > 4 H`
    allgather   else
"""

from __future__ import annotations

from onward.distribute.tensor.rules.attention import HEADS, INPUTS
from onward.distribute.tensor.sharding import split
from onward.distribute.tensor.ways import ShardedCall
from onward.graph.types import DType, Type

POSITIONS = split(2)


def method_of(call: ShardedCall) -> str:
    """The method of a call of attention. Where none is asked for, ranks have parts of weights and
    form no ring."""
    if call.method == "ring" and takes_ring(call):
        return "ring"
    if call.method == "alltoall" and takes_heads(call):
        return "alltoall"
    if call.method == "allgather":
        return "allgather"
    if takes_heads(call) and _heads_are_fewer(call):
        return "alltoall"
    may = call.method != "" and takes_ring(call) and _gathered_are_large(call)
    return "ring" if may else "allgather"


def takes_heads(call: ShardedCall) -> bool:
    """Whether ranks that have positions can exchange them for heads."""
    first, own, _ = INPUTS[call.node.op_type]
    q, k = call.type(first), call.type(first + 1)
    if q.rank != 4 or call.present(10 if len(own) > 3 else 6):
        return False
    alike = all(POSITIONS.fits(t, call.ranks) and HEADS.fits(t, call.ranks) for t in (q, k))
    return alike and isinstance(q.shape[1], int) and isinstance(k.shape[1], int)


def _heads_are_fewer(call: ShardedCall) -> bool:
    """Whether exchanging heads passes fewer bytes than gathering keys and values, forward and
    backward together: of q with H heads and keys with G, on N ranks, `(4 H + 4 G) / N` against
    `6 G`."""
    first, _, _ = INPUTS[call.node.op_type]
    heads, groups = call.type(first).shape[1], call.type(first + 1).shape[1]
    assert isinstance(heads, int) and isinstance(groups, int)
    return 4 * heads + 4 * groups < 6 * groups * call.ranks


def _gathered_are_large(call: ShardedCall) -> bool:
    """Whether keys, values and their gradients of all positions, `4 G N` heads of the rank's part,
    are more than four times its queries, results and their gradients, `4 H`."""
    first, _, _ = INPUTS[call.node.op_type]
    heads, groups = call.type(first).shape[1], call.type(first + 1).shape[1]
    if not isinstance(heads, int) or not isinstance(groups, int):
        return False
    return groups * call.ranks > 4 * heads


def takes_ring(call: ShardedCall) -> bool:
    """Whether each rank can attend to the keys of one rank at a time. Dropout draws by coordinates,
    beside which a call has no mask but of keys, no bias and no `fill`; under a causal mask queries
    and keys are as many."""
    if call.node.op_type == "Attention":
        return False
    first, own, (mask_at, bias_at) = INPUTS[call.node.op_type]
    q, k, v = (call.type(first + i) for i in range(3))
    if q.rank != 4 or call.present(10 if len(own) > 3 else 6) or call.present(13):
        return False
    if not all(POSITIONS.fits(t, call.ranks) for t in (q, k, v)):
        return False
    if call.attrs.get("is_causal") and q.shape[2] != k.shape[2]:
        return False
    if not drops(call.attrs):
        return True
    mask = call.type(mask_at) if call.present(mask_at) else None
    return is_of_keys(mask, q) and not call.present(bias_at) and "fill" not in call.attrs


def drops(attrs: dict[str, object]) -> bool:
    """Whether a call of attention has dropout, which draws by places in the sequence."""
    ratio = attrs.get("ratio", 0.0)
    assert isinstance(ratio, float | int)
    return ratio not in (0, 1)


def is_of_keys(mask: Type | None, q: Type) -> bool:
    """Whether a mask hides keys from all heads and queries of a sample alike, or is absent."""
    if mask is None:
        return True
    shape = (*[1] * (4 - mask.rank), *mask.shape)
    return mask.dtype == DType.BOOL and shape[0] in (1, q.shape[0]) and shape[1:3] == (1, 1)


__all__ = ["POSITIONS", "drops", "is_of_keys", "method_of", "takes_heads", "takes_ring"]
