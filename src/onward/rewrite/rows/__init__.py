"""Row demand: skips arithmetic for rows that nothing reads (`docs/notes/0006-row-demand.md`).

demand.py          finds the rows of every value that are read, by a backward walk
packer.py          writes the graph for these rows alone: packed values, and the sets in use
rules/             for each op, the rows that it reads and how it is packed; a file per family
sets.py            sets of rows, as conditions on the batch
set_masks.py       writes these sets into a graph, as masks
known.py           values that depend on the batch alone
pack.py            applies demand and packing to a graph
split_counting.py  separates the graph that counts a batch's rows from the step that uses them
lookups.py         the ids of a batch, also those at unread rows
flops.py           FLOPs of a graph, as a function of its sizes
attribution.py     FLOPs node by node, and why some rows are kept
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
    """The rules of row demand for an op.

    reads: given a `Question`, returns the rows of each input that the demanded rows of the outputs
    read. pack: writes the node for the demanded rows and records its results; or returns False, and
    the node then gets whole inputs. None: always whole inputs.
    """

    reads: demand.Rule
    pack: packer.Rule | None = None


def register(op: str, rule: RowRule) -> None:
    """Registers the rules of an op. Raises ValueError, with both places, where it has others."""
    demand.demand_rule(op)(rule.reads)
    if rule.pack is not None:
        packer.pack_rule(op)(rule.pack)


@dataclass(frozen=True)
class PackedForward:
    """A forward graph written for the rows that are read.

    reads: if the graph watches for reads of dropped rows, a description of each possible read, by
    the name of the output that is NaN if it happens; else empty.
    """

    graph: Graph
    reads: dict[str, str] = field(default_factory=dict)


def row_demand(
    graph: Graph,
    outputs: Sequence[str],
    refuse: Refuse = everything_taken,
    watch: bool = False,
    rounds: bool = False,
) -> tuple[PackedForward, PassReport]:
    """Returns a copy of a forward graph that computes only the rows that these outputs need, and a
    report.

    refuse: asked about attention of packed rows; an attention that it refuses gets whole inputs.
    watch: the copy tests whether dropped rows are read after all: it fills them with NaN and has
    outputs that show where NaN arrives. rounds: sets of rows have few sizes, so that most batches
    have the same ones (`Packer`). The report's edits are the nodes written packed; if 0, the
    copy computes the same as the graph.
    """
    made, reads = graph.clone(), dict[str, str]()

    def write(context: Context) -> int:
        edits, found = pack(made, outputs, context, watch, rounds)
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
