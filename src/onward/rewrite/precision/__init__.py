"""Mixed precision: casts a forward graph by a policy, and tidies the casts.

    policy.py        which op computes in which precision, and why: the one table
    write_casts.py   adds the casts that the policy asks for
    move_casts.py    moves casts through views, so that a weight is cast once
    low_attention.py lets attention multiply in low precision beside an addend of fp32
    cancel_casts.py  removes casts that undo each other
    fold_casts.py    folds casts into ops that read or write the other type themselves
    cast_again.py    casts weights once in each half of a step

Differentiation sees casts as ordinary ops, and every later pass preserves meaning.
"""

from onward.rewrite.precision.cancel_casts import cancel_casts
from onward.rewrite.precision.cast_again import cast_again
from onward.rewrite.precision.fold_casts import fold_casts
from onward.rewrite.precision.low_attention import low_attention
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
    "low_attention",
    "move_casts",
    "policy_for",
    "precision_of",
    "write_casts",
]
