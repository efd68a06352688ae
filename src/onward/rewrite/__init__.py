"""Graph -> graph of the same meaning. The two ordered lists of passes, each line with its reason.

A pass is `f(graph) -> int`: it edits in place and returns how many edits it made. Its name is its
function's; that name switches it off (`disable=`), and appears in reports and dumps.
"""

from __future__ import annotations

from onward.rewrite.cse import cse
from onward.rewrite.dead import dead
from onward.rewrite.flash_attention import flash_attention
from onward.rewrite.fold import fold
from onward.rewrite.noop import noop
from onward.rewrite.run import Pass, Report, prune, run
from onward.rewrite.scatter_into import scatter_into

FORWARD: tuple[Pass, ...] = (
    Pass(fold),  # constants first: everything after sees literals
    Pass(noop),  # identities hide equal expressions from cse
    Pass(cse),  # before differentiation, so that a gradient is derived once
    # sums a row in blocks; before differentiation, which would take attention apart
    Pass(flash_attention, exact=False, needs=("FlashAttention", "FlashAttentionGrad")),
    Pass(dead),  # last: sweeps what the others left
)

STEP: tuple[Pass, ...] = (
    Pass(fold),
    Pass(noop),  # reshapes of reshapes that rules wrote
    Pass(cse),  # masks and shape reads that forward and backward share
    Pass(scatter_into, exact=False),  # after cse: sums an embedding's rows into the head's gradient
    Pass(dead),
)

__all__ = ["FORWARD", "STEP", "Pass", "Report", "prune", "run"]
