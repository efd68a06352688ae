"""Session: what all the steps of a Trainer share, and the one place where plans meet memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol

import torch

from onward.compile import Compiler
from onward.execute import Executable, ExecutableHalves, Memory
from onward.graph.graph import Graph
from onward.graph.signature import Signature
from onward.plan import Plan
from onward.prepare.graphs import Graphs
from onward.prepare.prepared_batch import Bound

ROOM = 16  # a plan for counted rows has room for one in ROOM more
SMALL = 32 << 20  # where the plan before took fewer bytes, memory is cheaper than another plan:
ROOMY = 2  # there is room for one in ROOMY more


class StateTensors(Protocol):
    """Whoever holds the optimizer's state, accumulated gradients and the like between steps."""

    def owned(self, signature: Signature) -> Mapping[str, torch.Tensor]:
        """The tensors behind the state inputs of a plan, by input."""
        ...


@dataclass(frozen=True)
class Session:
    """The memory, the optimizer's state where there is one, and the budget of bytes that a step is
    planned within."""

    memory: Memory
    state: StateTensors | None = None
    memory_budget: int | float | str | None = None

    def bind(self, compiler: Compiler, graphs: Graphs, plan: Plan) -> Executable:
        """A plan of these graphs, with the tensors of the user and of the session."""
        state = {} if self.state is None else self.state.owned(plan.signature)
        owned = {**graphs.captured.owned, **state}
        return compiler.bind(plan, self.memory, owned, graphs.captured.regions)

    def bind_halves(self, compiler: Compiler, graphs: Graphs, plan: Plan) -> ExecutableHalves:
        """A plan that runs in two halves, bound in the same way. Blocks that are free go, for they
        may be much larger than what it needs."""
        self.memory.blocks.clear()
        captured = graphs.captured
        return compiler.bind_halves(plan, self.memory, captured.owned, captured.regions)


Bind = Callable[[Plan], Bound]


class PlanCache(Generic[Bound]):
    """Plans of one graph for batches of any size: each serves all sizes up to its own.

    bind: gives the executable of a plan. budget: of bytes, for graphs that are steps. label: before
    the names of dumps.
    """

    def __init__(
        self,
        compiler: Compiler,
        bind: Bind[Bound],
        budget: int | float | str | None = None,
        label: str = "",
    ) -> None:
        self._compiler, self._bind = compiler, bind
        self._budget, self._label = budget, label
        self._executables: dict[frozenset[str], Bound] = {}  # by the sizes that are not 0

    @property
    def plans(self) -> list[Plan]:
        """The plans that are bound."""
        return [executable.plan for executable in self._executables.values()]

    def serving(
        self,
        graph: Graph,
        outputs: list[str],
        dims: Mapping[str, int],
        counted: Collection[str] = (),
    ) -> Bound:
        """A bound plan for these sizes; where it must be made, with room for larger ones.

        counted: sizes that differ from batch to batch, so that room is left at once.
        """
        key = frozenset(n for n, size in dims.items() if size)
        found = self._executables.get(key)
        if found is not None and found.plan.serves(dims):
            return found
        before = {} if found is None else found.plan.dims
        small = found is not None and sum(found.plan.sizes.values()) < SMALL
        room = ROOMY if small and self._budget is None else ROOM
        most = dict(dims)
        for name in key:
            had, size = before.get(name, 0), dims[name]
            grows = size > had > 0 or name in counted
            most[name] = max(had, size + size // room if grows else size)
        self._executables.pop(key, None)
        open = [name for name, size in most.items() if size > 0]
        plan = self._compiler.plan(graph, outputs, most, self._budget, open, self._label)
        made = self._executables[key] = self._bind(plan)
        return made
