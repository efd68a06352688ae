"""Row demand: no arithmetic for rows that nobody reads (`docs/notes/0006-row-demand.md`).

demand.py          the rows of every value that are read: the walk
packer.py          the graph written for these rows alone: packed values, and the sets in use
rules/             a file per family of ops: the rows that it reads, and how it is written packed
sets.py            sets of rows, as conditions on the batch
set_masks.py       these sets written into a graph, as masks
known.py           values that follow from the batch alone
pack.py            demand and packing together
split_counting.py  the graph that counts a batch's rows, apart from the step that uses them
lookups.py         the ids of a batch, those at rows that nobody reads too
flops.py           the arithmetic of a graph, as a function of its sizes
attribution.py     the arithmetic node by node, and why some of it is kept
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from onward.graph.graph import Graph
from onward.rewrite.common_subexpression_elimination import common_subexpression_elimination
from onward.rewrite.context import Context, Refuse, everything_taken
from onward.rewrite.dead_code_elimination import dead_code_elimination
from onward.rewrite.noop import noop
from onward.rewrite.rows import demand, packer, rules
from onward.rewrite.rows.attribution import Attribution, attribute
from onward.rewrite.rows.demand import Demand, demands
from onward.rewrite.rows.flops import FlopCount
from onward.rewrite.rows.lookups import lookups
from onward.rewrite.rows.pack import pack
from onward.rewrite.rows.split_counting import row_conditions, split_counting, with_rows_given
from onward.rewrite.run import PassReport, measured


@dataclass(frozen=True)
class RowRule:
    """How row demand goes through an op.

    reads: from a `Question`, the rows of each input that the asked rows of the outputs read. pack:
    writes the node for the rows that are asked for and notes what it made, or answers False and is
    given wholes; None: always wholes.
    """

    reads: demand.Rule
    pack: packer.Rule | None = None


def register(op: str, rule: RowRule) -> None:
    """Enters the rule of an op. Raises ValueError, with both places, where it has another."""
    demand.demand_rule(op)(rule.reads)
    if rule.pack is not None:
        packer.pack_rule(op)(rule.pack)


@dataclass(frozen=True)
class PackedForward:
    """A forward graph written for the rows that are read.

    reads: of a graph that finds out whether dropped rows are read: which node reads what, by the
    name of the output that holds NaN then; empty of others.
    """

    graph: Graph
    reads: dict[str, str] = field(default_factory=dict)


def row_demand(
    graph: Graph,
    outputs: Sequence[str],
    refuse: Refuse = everything_taken,
    watch: bool = False,
) -> tuple[PackedForward, PassReport]:
    """A copy of a forward graph for the rows that these outputs need; the others are dropped.

    refuse: asked about attention of packed rows; what is refused gets its rows back in place.
    watch: asks for a graph that finds out whether dropped rows are read: they are NaN in it, and it
    has outputs that show where NaN arrives. The report's edits are the nodes written anew; with 0
    the copy does what the graph does.
    """
    made, reads = graph.clone(), dict[str, str]()

    def write(context: Context) -> int:
        edits, found = pack(made, outputs, context, watch)
        reads.update(found)
        for tidy in (noop, common_subexpression_elimination, noop, dead_code_elimination):
            tidy(made)
        return edits

    report = measured("row_demand", made, write, refuse)
    return PackedForward(made, reads), report


__all__ = [
    "Attribution",
    "Demand",
    "FlopCount",
    "PackedForward",
    "RowRule",
    "attribute",
    "demands",
    "lookups",
    "register",
    "row_conditions",
    "row_demand",
    "rules",
    "split_counting",
    "with_rows_given",
]  # fmt: skip
