"""What a step leaves out as unread: its ids are checked, and that it is unread can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from onward.compile import Compiled
from onward.config import OnwardError
from onward.differentiate import vjp
from onward.execute import Executable
from onward.graph.graph import Graph
from onward.graph.names import cotangent_name, gradient_name
from onward.rewrite import STEP, Pass, cut, lookups, run

PlanOf: TypeAlias = Callable[[Graph, list[str], Mapping[str, int], bool], Executable]


class Ids:
    """The ids that a forward graph looks up in its tables, on every row of a batch."""

    def __init__(self, forward: Graph, plan: PlanOf) -> None:
        self._graph, self._tables = lookups(forward)
        self._plan = plan
        self._executable: Executable | None = None  # for the largest sizes seen

    def within(self, staged: Mapping[str, torch.Tensor], dims: Mapping[str, int]) -> bool:
        """Whether its table has every id."""
        if not self._tables or not all(dims.values()):
            return True
        found = self._executable
        if found is None or not found.plan.serves(dims):
            before = {} if found is None else found.plan.dims
            most = {name: max(size, before.get(name, 0)) for name, size in dims.items()}
            found = self._executable = self._plan(self._graph, list(self._tables), most, True)
        found.run(staged, dims)
        for name, rows in self._tables.items():
            least, largest = found.view(name).tolist()
            if least < 0 or largest >= rows:
                return False
        return True


class Unread:
    """Finds out whether rows that are left out as unread are read after all (`ONWARD_CHECK`)."""

    def __init__(
        self, compiled: Compiled, forward: Graph, outputs: Sequence[str], plan: PlanOf
    ) -> None:
        self._compiled, self._forward, self._outputs = compiled, forward, outputs
        self._plan = plan

    def check(
        self, inputs: Mapping[str, torch.Tensor], dims: Mapping[str, int], gradients: bool
    ) -> None:
        """Raises OnwardError where NaN in those rows arrives in the loss or a gradient."""
        forward, reads = self._compiled.reads(self._outputs)
        found = self._nan(forward, [*reads], inputs, dims, gradients)
        reached = [name for name in found if name not in reads]
        if reached:  # NaN of the batch's own arrives without them too
            own = self._nan(self._forward, [], inputs, dims, gradients)
            reached = [name for name in reached if name not in own]
        if reached:
            path = next((reads[name] for name in found if name in reads), "an unknown op")
            raise OnwardError(
                f"row demand: {path} that were left out as unread, and {reached[0]} shows it; "
                "fix: TrainerOptions(disable=('row_demand',)), and report the model"
            )

    def _nan(
        self,
        forward: Graph,
        more: list[str],
        inputs: Mapping[str, torch.Tensor],
        dims: Mapping[str, int],
        gradients: bool,
    ) -> list[str]:
        """Which of the loss, the gradients and `more` hold NaN."""
        wanted, graph = [*more, *self._outputs], forward
        if gradients:
            parameters = self._compiled.captured.parameters
            trained = [n for n, p in parameters.items() if p.requires_grad]
            graph, _ = run(vjp(graph, ["loss"], trained), [p for p in STEP if isinstance(p, Pass)])
            wanted += [g for n in trained if (g := gradient_name(n)) in graph.outputs]
        _, graph = cut(graph)
        executable = self._plan(graph, wanted, dims, False)
        step: dict[str, Any] = {
            "seed": torch.zeros(2, dtype=torch.int64), "sample_offset": 0,
            cotangent_name("loss"): 1.0,
        }  # fmt: skip
        executable.run({**inputs, **step})
        values = {name: executable.view(name) for name in wanted}
        return [n for n, x in values.items() if x.is_floating_point() and bool(x.isnan().any())]
