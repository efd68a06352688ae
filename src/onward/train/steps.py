"""What runs a batch: a captured call, its graphs, and the plans made of them.

A step exists in two forms. The wide one computes every row, and is planned for each shape of
batch. The narrow one computes the rows that are read (`rewrite/rows`); it is planned for the most
rows seen, and each batch runs on its own counts. Which one runs is decided for every batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from onward.compile import Compiled
from onward.config import CaptureError, OnwardError, environment
from onward.execute import Executable
from onward.graph.graph import Graph
from onward.graph.names import OUTPUT, output_name, user_name
from onward.plan import Plan, bind, make_plan
from onward.rewrite import Work, account, cut, prune, rows_name
from onward.train.call import Call
from onward.train.explain import Explanation, explain
from onward.train.unread import Ids, Unread

KEPT = 64  # plans of one graph that stay bound, one per shape and set of outputs
ROOM = 16  # a plan for counted rows has room for one in ROOM more

Complete: TypeAlias = Callable[[Graph], Graph]  # a forward graph -> the graph of the whole step
Bind: TypeAlias = Callable[[Compiled, Graph, Plan], Executable]


@dataclass(frozen=True)
class Ready:
    """An executable, the sizes and the further inputs with which it runs a batch."""

    executable: Executable
    dims: dict[str, int]
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    share: float = 1.0  # of the wide form's arithmetic

    @property
    def rows(self) -> dict[str, Any]:
        """For reports."""
        counts = {name.removeprefix("rows."): len(x) for name, x in self.inputs.items()}
        return {"arithmetic_done": self.share, "counts": counts}


@dataclass(frozen=True)
class Wanted:
    """What a run is to compute: outputs of the model by name, and those of the step by prefix."""

    names: tuple[str, ...]
    ends: tuple[str, ...] = ()

    def outputs(self, graph: Graph) -> list[str]:
        ends = [n for n in graph.outputs if n.startswith(self.ends)] if self.ends else []
        return [*_outputs(graph, self.names), *ends]


def _outputs(graph: Graph, names: Iterable[str]) -> list[str]:
    """The loss and the model's outputs of these names, as the graph calls them."""
    return ["loss", *(output_name(n) for n in names if output_name(n) in graph.outputs)]


class Step:
    """A captured call. `kind` is the call's structure and dtypes."""

    def __init__(
        self,
        kind: tuple[Any, ...],
        compiled: Compiled,
        complete: Complete,
        bind: Bind,
        memory_budget: int | float | str | None = None,
    ) -> None:
        self.kind, self.compiled = kind, compiled
        self._graph: Graph | None = None
        self.complete, self._bind, self._budget = complete, bind, memory_budget
        self._dims: dict[Any, dict[str, int]] = {}  # of the signatures seen
        self.executables: dict[Any, Executable] = {}  # of the wide form
        self._narrow: dict[tuple[str, ...], Narrow | None] = {}

    @property
    def graph(self) -> Graph:
        """The whole step on every row."""
        if self._graph is None:
            self._graph = self.complete(self.compiled.forward)
        return self._graph

    def fits(self, call: Call) -> bool:
        """Whether the graph was captured from a call like this one."""
        if call.signature in self._dims:
            return self.compiled.captured.suits(call.tensors)
        if self.kind != call.kind:
            return False
        dims = self.compiled.captured.dims(call.tensors)
        if dims is not None:
            self._dims[call.signature] = dims
        return dims is not None

    def _sizes(self, call: Call) -> dict[str, int]:
        if not self.fits(call):
            raise CaptureError("the captured graph does not fit the batch it was captured from")
        return self._dims[call.signature]

    def staged(self, call: Call) -> dict[str, torch.Tensor]:
        """The call's tensors by graph input name."""
        leaves = self.compiled.captured.leaves
        return {leaves[i]: t for i, t in enumerate(call.tensors)}

    def ready(self, call: Call, wanted: Wanted) -> Ready:
        """What runs this batch. Raises OnwardError for an output that the model lacks."""
        dims = self._sizes(call)
        narrow = self.narrow(wanted.names)
        if narrow is not None:
            found = narrow.ready(self.staged(call), dims, wanted)
            if found is not None:
                return found
        key = (call.signature, wanted)
        executable = self.executables.pop(key, None)
        if executable is None:
            executable = self.plan(self.graph, wanted.outputs(self.graph), dims)
        self.executables[key] = executable  # now the most recently used
        while len(self.executables) > KEPT:
            del self.executables[next(iter(self.executables))]
        return Ready(executable, dims)

    def explain(self, call: Call, names: tuple[str, ...]) -> Explanation:
        """What row demand does with this batch."""
        dims, staged = self._sizes(call), self.staged(call)
        narrow = self.narrow(names)

        def conditions(graph: Graph) -> dict[str, torch.Tensor]:
            executable = self.plan(graph, list(graph.outputs), dims, label="explain-")
            executable.run(staged)
            return {name: executable.output(name) for name in graph.outputs}

        pays = False
        if narrow is not None:
            rows = narrow.count(staged, dims)
            pays = narrow.pays(dims | {size: len(numbers) for size, numbers in rows.items()})
        forward = self.compiled.forward
        outputs = _outputs(forward, names)
        return explain(lambda without: account(forward, outputs, without), conditions, dims, pays)

    def narrow(self, names: tuple[str, ...]) -> Narrow | None:
        """The form for the rows that these outputs need; None where that is all of them."""
        if names not in self._narrow:
            self._check(names)
            forward = self.compiled.narrow(_outputs(self.compiled.forward, names))
            self._narrow[names] = None if forward is None else Narrow(self, forward, names)
        return self._narrow[names]

    def plan(
        self,
        graph: Graph,
        outputs: list[str],
        dims: Mapping[str, int],
        open: bool = False,
        label: str = "",
    ) -> Executable:
        """A new plan, bound. `open`: it also serves smaller sizes."""
        names = [n for n, size in dims.items() if size > 0] if open else []
        budget = None if label else self._budget
        plan = self.compiled.plan(graph, outputs, dims, budget, names, label)
        return self.bound(graph, plan)

    def bound(self, graph: Graph, plan: Plan) -> Executable:
        """A plan with the tensors of the user and of the session."""
        return self._bind(self.compiled, graph, plan)

    def _check(self, names: tuple[str, ...]) -> None:
        have = [user_name(n) for n in self.compiled.forward.outputs if n.startswith(OUTPUT)]
        unknown = next((n for n in names if n not in (*have, "loss")), None)
        if unknown is not None:
            named = ", ".join(have) or "none but its loss"
            raise OnwardError(f"no output '{unknown}' to fetch; the model has: {named}")


class Narrow:
    """A step on the rows that are read, whose numbers the batch itself says."""

    def __init__(self, step: Step, forward: Graph, names: tuple[str, ...]) -> None:
        self.step, self.forward = step, forward
        self.conditions, _ = cut(forward)
        wide = step.compiled.forward
        self.work = Work(forward), Work(prune(wide, _outputs(wide, names)))
        self.running = False
        self._graph: Graph | None = None
        self._counting = Pool(step, lambda: self.conditions, "rows-")
        self._plans: dict[Wanted, Pool] = {}
        self._ids = Ids(prune(wide, _outputs(wide, names)), self._quiet)
        self._unread = Unread(step.compiled, forward, _outputs(forward, names), self._quiet)

    def _quiet(
        self, graph: Graph, outputs: list[str], dims: Mapping[str, int], open: bool
    ) -> Executable:
        """A plan for a graph that only looks at a batch, and is no stage of a step."""
        bound = bind(prune(graph, outputs), dims, list(dims) if open else [])
        plan = make_plan(bound, dict(dims), target=self.step.compiled.target)
        return self.step.bound(graph, plan)

    @property
    def graph(self) -> Graph:
        """The whole step, with the rows' numbers as inputs."""
        if self._graph is None:
            _, self._graph = cut(self.step.complete(self.forward))
        return self._graph

    def ready(
        self, staged: Mapping[str, torch.Tensor], dims: dict[str, int], wanted: Wanted
    ) -> Ready | None:
        """The step for this batch; None where too few rows can be spared, and for ids that no table
        has, at rows that nobody reads: the wide form refuses them as eager does."""
        rows, sizes = self.count(staged, dims), dims
        dims = dims | {size: len(numbers) for size, numbers in rows.items()}
        if not self.pays(dims) or not self._ids.within(staged, sizes):
            return None
        pool = self._plans.setdefault(wanted, Pool(self.step, lambda: self.graph))
        executable = pool.serving(dims, wanted.outputs(self.graph), counted=rows)
        inputs = {rows_name(size): numbers for size, numbers in rows.items()}
        if environment().check:
            self._unread.check({**staged, **inputs}, dims, gradients=bool(wanted.ends))
        return Ready(executable, dims, inputs, self.share(dims))

    def count(
        self, staged: Mapping[str, torch.Tensor], dims: Mapping[str, int]
    ) -> dict[str, torch.Tensor]:
        """The numbers of the rows of each set, `i64[R]`, by the name of R."""
        executable = self._counting.serving(dims, list(self.conditions.outputs))
        executable.run(staged, dims)
        return {size: executable.view(size).nonzero().view(-1) for size in self.conditions.outputs}

    def share(self, dims: Mapping[str, int]) -> float:
        """The narrow step's arithmetic as a share of the wide one's."""
        narrow, wide = (w.flops(dims) for w in self.work)
        return narrow / wide if wide else 1.0

    def pays(self, dims: Mapping[str, int]) -> bool:
        """Whether to run the narrow form. What ran last stays unless the other is clearly better,
        so that batches near the bound do not change places in memory."""
        share = self.share(dims)
        self.running = share < (0.99 if self.running else 0.95)
        return self.running


class Pool:
    """Plans of one graph for batches of any size: each serves all sizes up to its own."""

    def __init__(self, step: Step, graph: Callable[[], Graph], label: str = "") -> None:
        self._step, self._graph, self._label = step, graph, label
        self._executables: dict[frozenset[str], Executable] = {}  # by the sizes that are not 0

    def serving(
        self, dims: Mapping[str, int], outputs: list[str], counted: Mapping[str, Any] | None = None
    ) -> Executable:
        """A bound plan for these sizes; where it must be made, with room for larger ones.

        counted: sizes that differ from batch to batch, so that room is left at once.
        """
        key = frozenset(n for n, size in dims.items() if size)
        found = self._executables.get(key)
        if found is not None and found.plan.serves(dims):
            return found
        most = dict(dims)
        for name in key:
            before = found.plan.dims[name] if found is not None else 0
            grows = dims[name] > before > 0 or (counted is not None and name in counted)
            most[name] = max(before, dims[name] + dims[name] // ROOM if grows else dims[name])
        self._executables.pop(key, None)
        self._executables[key] = self._step.plan(
            self._graph(), outputs, most, open=True, label=self._label
        )
        return self._executables[key]
