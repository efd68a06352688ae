"""The names of Onward's rewrite passes, by which its options switch them off."""

from __future__ import annotations

from onward.rewrite import FORWARD, STEP, FusionPass

ROW_DEMAND = "row_demand"  # is no pass of the two lists, but is switched off like one


def names() -> list[str]:
    """Each pass once, in order."""
    return list(dict.fromkeys([*(item.name for item in (*FORWARD, *STEP)), ROW_DEMAND]))


def fusions() -> list[str]:
    """The passes that write fused ops."""
    return [item.name for item in (*FORWARD, *STEP) if isinstance(item, FusionPass)]
