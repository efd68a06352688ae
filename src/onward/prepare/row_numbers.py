"""Row numbers: the indices of the rows that a packed graph computes, found from the batch
itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from onward.compile import Compiler
from onward.graph.graph import Graph
from onward.plan import Plan
from onward.prepare.graphs import Graphs
from onward.prepare.session import PlanCache, Session
from onward.rewrite import row_conditions

Rows = Mapping[str, torch.Tensor]  # indices i64[R] of the rows of a set, by the name of its size R


class RowNumbers:
    """Finds the row indices of one packed forward. Its sets of rows, and their sizes R, are its
    own."""

    def __init__(
        self, forward: Graph, compiler: Compiler, graphs: Graphs, session: Session
    ) -> None:
        self._conditions = row_conditions(forward)
        bind = partial(session.bind, compiler, graphs)
        self._counting = PlanCache(compiler, bind, label="rows-")

    @property
    def plans(self) -> list[Plan]:
        """The plans that inspect a batch."""
        return self._counting.plans

    def of(self, staged: Mapping[str, torch.Tensor], dims: Mapping[str, int]) -> Rows:
        """The indices of the rows of each set for this batch."""
        sizes = list(self._conditions.outputs)
        executable = self._counting.serving(self._conditions, sizes, dims)
        executable.run(staged, dims)
        return {size: executable.view(size).nonzero().view(-1) for size in sizes}


def given(graph: Graph, rows: Rows) -> dict[str, torch.Tensor]:
    """The row indices by the graph inputs that `with_rows_given` has made for them."""
    named = graph.signature.rows
    return {named[size]: numbers for size, numbers in rows.items()}
