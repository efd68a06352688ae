"""Mixed precision: a cast policy written into a forward graph, and the passes that tidy its casts.

    policy.py        which op computes in which precision, and why: the one table
    write_casts.py   the casts that the policy asks for
    move_casts.py    casts through views to what they show, so that a weight is cast once
    cancel_casts.py  casts that undo each other
    fold_casts.py    casts into ops that read or write the other type themselves
    cast_again.py    casts of weights once for each half of a step

Differentiation then sees casts as any other op, and every later pass preserves meaning.
"""

from onward.rewrite.precision.cancel_casts import cancel_casts
from onward.rewrite.precision.cast_again import cast_again
from onward.rewrite.precision.fold_casts import fold_casts
from onward.rewrite.precision.move_casts import move_casts
from onward.rewrite.precision.policy import (
    Policy,
    Precision,
    lines,
    policy_for,
    precision_of,
)
from onward.rewrite.precision.write_casts import write_casts

__all__ = [
    "Policy",
    "Precision",
    "cancel_casts",
    "cast_again",
    "fold_casts",
    "lines",
    "move_casts",
    "policy_for",
    "precision_of",
    "write_casts",
]
