"""Each op has a gradient, a row rule, a kernel and a body, or the table says why it has none."""

from __future__ import annotations

from collections import Counter

import onnx
import pytest
from op_table import NOTHING_FLOWS, OPAQUE, SIZES, STOPS, UNWRITTEN, WITHOUT

from onward.differentiate.rule_table import NO_GRADIENT, RULES
from onward.graph.ops import OPS, OWN, STANDARD, named
from onward.kernels import KERNELS
from onward.rewrite.rows.demand import DEMAND
from onward.rewrite.rows.packer import PACK

SHARED = ("elementwise", "reduces", "reshapes")  # traits that row rules are shared by
HAVING = {
    "gradient": {*RULES},
    "rows": {*DEMAND},
    "kernel": {*KERNELS},
}


@pytest.mark.parametrize("part", WITHOUT)
def test_what_has_no_such_part_has_one_reason_in_the_table(part: str) -> None:
    said = Counter(name for names in WITHOUT[part].values() for name in names)
    assert set(said.values()) == {1}
    assert set(said) == set(OPS) - HAVING[part]


def test_the_standards_ops_alone_have_no_body() -> None:
    assert {*STANDARD} | {*OWN} == {*OPS} and not {*STANDARD} & {*OWN}
    assert all(op.body is None and onnx.defs.has(name) for name, op in STANDARD.items())
    assert all(op.body is not None for op in OWN.values())


def test_no_gradient_is_said_of_ops_that_have_no_rule() -> None:
    reasons = WITHOUT["gradient"]
    assert reasons[NOTHING_FLOWS] | reasons[SIZES] | reasons[OPAQUE] | reasons[STOPS] == NO_GRADIENT
    assert not NO_GRADIENT & {*RULES}


def test_row_rules_by_trait_are_those_of_the_traits() -> None:
    shared = {name for trait in SHARED for name in named(trait)}
    assert shared <= {*DEMAND} and shared <= {*PACK}
    assert {name for name in DEMAND if not DEMAND.has_own(name)} == shared
    # places of packed rows would be others: they are put back before it
    assert {*PACK} == {*DEMAND} - {"GatherElements"}


@pytest.mark.parametrize("name", sorted(WITHOUT["kernel"][UNWRITTEN]))
def test_what_nothing_writes_is_the_standards(name: str) -> None:
    """A graph with an op that Onward never writes is for other engines, so the op must be
    standard."""
    assert name in STANDARD
