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
from onward.kernels.quota import follow_quota
from onward.plan import Plan
from onward.prepare.graphs import Graphs
from onward.prepare.prepared_batch import Bound

ROOM = 16  # a plan for counted rows leaves room for 1/ROOM more rows
# bytes; a plan smaller than this leaves room for 1/ROOMY more: memory costs less than replanning
SMALL = 32 << 20
ROOMY = 2


class StateTensors(Protocol):
    """The owner of optimizer state, accumulated gradients and the like between steps."""

    def owned(self, signature: Signature) -> Mapping[str, torch.Tensor]:
        """The tensors of a plan's state inputs, by graph input."""
        ...


@dataclass(frozen=True)
class Session:
    """The memory that steps share, the optimizer's state if any, the memory budget of a step, and
    the tensor in which this process keeps one of the model's (`stored`), the same by default."""

    memory: Memory
    state: StateTensors | None = None
    memory_budget: int | float | str | None = None
    stored: Callable[[torch.Tensor], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        follow_quota()  # before anything is planned for a number of threads

    def bind(self, compiler: Compiler, graphs: Graphs, plan: Plan) -> Executable:
        """Binds a plan of these graphs to the session's memory and to the tensors of user and
        session."""
        state = {} if self.state is None else self.state.owned(plan.signature)
        owned = {**graphs.captured.owned, **state}
        if self.stored is not None:
            owned = {name: self.stored(tensor) for name, tensor in owned.items()}
        return compiler.bind(plan, self.memory, owned, graphs.captured.regions)

    def bind_halves(self, compiler: Compiler, graphs: Graphs, plan: Plan) -> ExecutableHalves:
        """Binds a plan that runs in two halves, as `bind` does. Frees unused blocks first, since
        they may be much larger than this plan needs."""
        self.memory.blocks.clear()
        captured = graphs.captured
        return compiler.bind_halves(plan, self.memory, captured.owned, captured.regions)


Bind = Callable[[Plan], Bound]


class PlanCache(Generic[Bound]):
    """The bound plans of one graph for batches of any size: each serves all sizes up to its own.

    bind: makes the executable of a plan. budget: bytes, for graphs that are steps. label: prefix of
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
        # by the names of the sizes that are not 0
        self._executables: dict[frozenset[str], Bound] = {}

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
        """Returns a bound plan for these sizes; a new one has room for larger sizes.

        counted: sizes that differ from batch to batch: even the first plan leaves room for them.
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
