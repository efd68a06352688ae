"""What an explanation says of the exchanges of a rank's step."""

from __future__ import annotations

from collections.abc import Iterator

from onward.graph.ops.collective import STARTS
from onward.plan import Plan

# by op and the end of a record: how calls of attention attend to positions of other ranks
_METHODS = {
    ("ExchangeStart", "round the ring"): "keys and values go round a ring",
    ("AllToAllStart", ""): "positions are exchanged for heads",
}


def exchange_notes(plan: Plan) -> Iterator[str]:
    """Yields how calls of attention attend to positions of other ranks, where they do not gather
    keys and values: a line for each method and axis."""
    found: dict[tuple[str, str], set[str]] = {}
    for launch in plan.launches:
        if launch.op not in STARTS or launch.backward:
            continue
        record = str(launch.attrs["record"])
        is_attention = "FlashAttention" in record or record.endswith("round the ring")
        for (op, end), said in _METHODS.items():
            if is_attention and launch.op == op and record.endswith(end):
                found.setdefault((launch.attrs["axis"], said), set()).add(launch.module)
    for (axis, said), modules in found.items():
        calls = "1 call" if len(modules) == 1 else f"{len(modules)} calls"
        yield f"in {calls} of attention along {axis} {said}"


__all__ = ["exchange_notes"]
