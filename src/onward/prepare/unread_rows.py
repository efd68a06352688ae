"""Checks of the rows that a packed step leaves out: their ids are valid, and nothing reads them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from onward.compile import Compiler
from onward.errors import OnwardError
from onward.execute import Executable
from onward.graph.graph import Graph
from onward.journal import Journal
from onward.plan import Plan
from onward.prepare.graphs import Graphs
from onward.prepare.prepared_batch import scalars
from onward.prepare.row_numbers import RowNumbers, Rows, given
from onward.prepare.session import Session
from onward.rewrite import STEP, FusionPass, PackedForward, lookups, with_rows_given


class Ids:
    """Checks the ids of all rows of a batch that a forward graph looks up in its tables."""

    def __init__(self, forward: Graph, graphs: Graphs, session: Session) -> None:
        self._graph, self._tables = lookups(forward)
        self._graphs, self._session = graphs, session
        self._executable: Executable | None = None  # for the largest sizes seen

    @property
    def plans(self) -> list[Plan]:
        """The plan of the last check, if any."""
        return [] if self._executable is None else [self._executable.plan]

    def within(self, staged: Mapping[str, torch.Tensor], dims: Mapping[str, int]) -> bool:
        """Whether each id of the batch lies within its table."""
        if not self._tables or not all(dims.values()):
            return True
        found = self._executable
        if found is None or not found.plan.serves(dims):
            before = {} if found is None else found.plan.dims
            most = {name: max(size, before.get(name, 0)) for name, size in dims.items()}
            quiet = self._graphs.compiler.here.quiet()
            plan = quiet.plan(self._graph, self._tables, most, open=most)
            found = self._executable = self._session.bind(quiet, self._graphs, plan)
        found.run(staged, dims)
        for name, rows in self._tables.items():
            least, largest = found.view(name).tolist()
            if least < 0 or largest >= rows:
                return False
        return True


class Unread:
    """Finds out whether rows left out as unread are read after all (`ONWARD_CHECK`)."""

    def __init__(self, graphs: Graphs, forward: Graph, session: Session) -> None:
        self._graphs, self._forward, self._session = graphs, forward, session
        # without fused ops, whose kernels may not propagate NaN
        fused = [p.name for p in STEP if isinstance(p, FusionPass)]
        before = graphs.compiler.here
        self._compiler = Compiler(
            before.target,
            [*before.disable, *fused],
            Journal(quiet=True),
            before.policy,
            before.mesh,
        )
        self._filled: tuple[PackedForward, RowNumbers] | None = None  # with NaN in the unread rows

    def check(
        self,
        staged: Mapping[str, torch.Tensor],
        sizes: Mapping[str, int],
        rows: Rows,
        gradients: bool,
    ) -> None:
        """Fills the unread rows with NaN and raises OnwardError where it arrives in the loss or a
        gradient. rows: those that the packed step computes. Checks nothing where parts run in
        PyTorch, since these may run only once per step."""
        if self._graphs.captured.regions:
            return
        if self._filled is None:
            outputs = list(self._forward.outputs)
            packed = self._compiler.pack(self._graphs.forward, outputs, watch=True)
            assert packed is not None, "the rows that are read are all rows after all"
            # the sets of rows may differ from the step's
            numbers = RowNumbers(packed.graph, self._compiler, self._graphs, self._session)
            self._filled = packed, numbers
        packed, numbers = self._filled
        forward, reads = packed.graph, packed.reads
        found = self._nan(forward, [*reads], staged, sizes, numbers.of(staged, sizes), gradients)
        reached = [name for name in found if name not in reads]
        if reached:  # the batch may hold NaN itself, which arrives without the filling too
            own = self._nan(self._forward, [], staged, sizes, rows, gradients)
            reached = [name for name in reached if name not in own]
        if reached:
            path = next((reads[name] for name in found if name in reads), "an unknown op")
            raise OnwardError(
                f"row demand: {path} that were left out as unread, which changes "
                f"{reached[0]}; fix: TrainerOptions(disable=('row_demand',)), and report this "
                "as a bug, with the model"
            )

    def _nan(
        self,
        forward: Graph,
        more: list[str],
        staged: Mapping[str, torch.Tensor],
        sizes: Mapping[str, int],
        rows: Rows,
        gradients: bool,
    ) -> list[str]:
        """The names of the loss, the gradients and `more` that hold NaN."""
        wanted, graph = [*more, *self._forward.outputs], forward
        if gradients:
            graph = self._compiler.gradients(graph, sorted(self._graphs.captured.reached), ())
            wanted += graph.signature.gradients.values()
        graph = with_rows_given(graph)
        dims = {**sizes, **{size: len(numbers) for size, numbers in rows.items()}}
        plan = self._compiler.plan(graph, wanted, dims)
        executable = self._session.bind(self._compiler, self._graphs, plan)
        seed = torch.zeros(2, dtype=torch.int64)
        told = scalars(graph.signature, seed, offset=0, weight=1.0)
        executable.run({**staged, **given(graph, rows), **told})
        values = {name: executable.view(name) for name in wanted}
        return [n for n, x in values.items() if x.is_floating_point() and bool(x.isnan().any())]
