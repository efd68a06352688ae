"""The table of ops, and sets derived from it; every record is added by `register`.

The derived dicts and sets are updated in place: whoever holds one sees later records too.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Any

import onnx

from onward.graph.ops.record import Op
from onward.graph.registry import enter

OPS: dict[str, Op] = {}
STANDARD: dict[str, Op] = {}
OWN: dict[str, Op] = {}
_NAMED: dict[str, set[str]] = {
    trait: set() for trait in ("elementwise", "view", "reshapes", "reduces", "random", "opaque")
}


def register(op: Op) -> None:
    """Registers a record. Raises ValueError where the name is taken or invalid, and for an op that
    is neither of the ONNX standard nor has a body in its ops."""
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", op.name):
        raise ValueError(
            f"{op.name!r} is not a valid name of an op; fix: a name such as SquaredRelu"
        )
    if op.body is None and not onnx.defs.has(op.name):
        raise ValueError(f"ONNX has no op {op.name}; fix: give its record a body in standard ops")
    if op.body is not None and op.view:
        raise ValueError(
            f"the op {op.name} cannot be a view, since only standard ONNX ops have known "
            "strides; fix: leave that trait out"
        )
    enter(OPS, "op", op.name, op, _written_in)
    (STANDARD if op.body is None else OWN)[op.name] = op
    for trait, names in _NAMED.items():
        if getattr(op, trait):
            names.add(op.name)


def _written_in(op: Op) -> Any:
    return op.infer if op.body is None else op.body


def named(trait: str) -> Set[str]:
    """The ops whose record has the trait; later records are added to the set."""
    return _NAMED[trait]


__all__ = ["OPS", "OWN", "STANDARD", "named", "register"]
