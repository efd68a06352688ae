"""Rules of collectives along another axis of the mesh, which an earlier way of sharing the work has
written: ranks with a part of each operand exchange that part, by as many messages of fewer bytes.

A wait has the shardings of its start (`StepSharding`), so that nothing comes between the two.
"""

from __future__ import annotations

from collections.abc import Iterator

from onward.distribute.tensor.sharding import MAX, PARTIAL, REPLICATED, SUM
from onward.distribute.tensor.ways import ShardedCall, Way, way_rule

# the reductions that may be taken in any order with the one by which a rank's terms are reduced
_COMMUTES = {SUM: ("sum", "mean"), MAX: ("max",)}


@way_rule("AllReduceStart")
def _reduced(call: ShardedCall) -> Iterator[Way]:
    """Parts of each tensor by itself; terms where both reductions are of one kind."""
    by = call.attrs["reduction"]
    kept = tuple(
        s if s is not None and (s.dim is not None or by in _COMMUTES.get(s.terms, ()))
        else REPLICATED
        for s in call.given
    )  # fmt: skip
    yield Way(kept, kept)


@way_rule("AllGatherStart", "ReduceScatterStart", "AllToAllStart")
def _behind_dim_0(call: ShardedCall) -> Iterator[Way]:
    """Parts along the dims behind the first, along which these collectives cut and join; terms of
    sums, which all of them keep."""
    if call.number != 1:
        return
    found = call.given[0]
    assert found is not None
    is_sum = call.attrs.get("reduction", "sum") in ("sum", "mean")
    if found.dim or (found == PARTIAL and is_sum):
        yield Way((found,), (found,))
