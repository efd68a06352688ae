"""Graph -> graph of the same meaning; `lists.py` has the three ordered lists of passes.

A pass is `f(graph) -> int`: it edits the graph in place and returns its number of edits. The
function's name is the pass's: it appears in reports and dumps, and `disable=` takes it. A pass that
writes own ops is `f(graph, context) -> int`: at each place it asks the context whether kernels
accept the call, and if not, records a near miss (`context.py`).
"""

from __future__ import annotations

from onward.rewrite.context import Context, Fusion, NearMiss, Refuse, everything_taken, summary
from onward.rewrite.lists import (
    FORWARD,
    PRECISION,
    STEP,
    halves,
    in_precision,
    register,
    switched_off,
    switches,
    without_fusions,
)
from onward.rewrite.precision import Policy, policy_for
from onward.rewrite.recompute import recompute
from onward.rewrite.rows import (
    Attribution,
    FlopCount,
    PackedForward,
    attribute,
    lookups,
    row_conditions,
    row_demand,
    split_counting,
    with_rows_given,
)
from onward.rewrite.run import AnyPass, FusionPass, Pass, PassReport, measured, prune, run
from onward.rewrite.scatter_elements import scatter_elements
from onward.rewrite.specialize import name_sizes, specialize

__all__ = [
    "FORWARD",
    "PRECISION",
    "STEP",
    "AnyPass",
    "Attribution",
    "Context",
    "FlopCount",
    "Fusion",
    "FusionPass",
    "NearMiss",
    "PackedForward",
    "Pass",
    "PassReport",
    "Policy",
    "Refuse",
    "attribute",
    "everything_taken",
    "halves",
    "in_precision",
    "lookups",
    "measured",
    "name_sizes",
    "policy_for",
    "prune",
    "recompute",
    "register",
    "row_conditions",
    "row_demand",
    "run",
    "scatter_elements",
    "specialize",
    "split_counting",
    "summary",
    "switched_off",
    "switches",
    "with_rows_given",
    "without_fusions",
]
