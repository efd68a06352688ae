"""The flow, on one page. The only module that puts every stage in order.

    capture -> rewrite(forward) -> row demand -> differentiate -> update -> distribute(mesh)
            -> rewrite(step) -> specialize(dims) -> plan -> execute
The methods of `Compiler` run the stages; each takes a value and returns one:
    captured   = compiler.capture(request)                 Captured
    forward    = compiler.forward(captured)                Graph
    packed     = compiler.pack(forward, outputs)           PackedForward; None: nothing is packed
    step       = compiler.step(forward, recipe)            Graph; or compiler.halves(forward, ..)
    plan       = compiler.plan(step, outputs, dims)        Plan
    executable = compiler.bind(plan, memory, owned)        Executable
`compiler.portable(captured)` and `portable_step` make Graphs for other engines. The compiler's
journal records the seconds, reports and dumps of each method by its name. Captures are cached on
disk (capture_cache.py), and so are the graphs of methods that use `self.cache` (graph_cache.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from onward import capture_cache, rewrite
from onward.capture import Captured, CapturedModule, CaptureRequest, capture, evaluation
from onward.differentiate import (
    Recipe,
    add_updates,
    divisor_of_all,
    summed,
    update_alone,
    vjp,
)
from onward.distribute import (
    Mesh,
    cut_along,
    distribute,
    gathered_ahead,
    length_parts,
    number_in_order,
    pipeline,
    require_shareable,
    shares_steps,
    splits_sequences,
    tensor,
)
from onward.distribute.tensor import DeviceRates, chosen_cuts, link_rates
from onward.distribute.tensor.conversions import Costs
from onward.environment import environment
from onward.execute import Executable, ExecutableHalves, Memory
from onward.extend import load_plugins
from onward.graph.graph import Graph, Role, type_of
from onward.graph.spec import Stage
from onward.graph.types import Type
from onward.graph_cache import GraphCache
from onward.journal import Journal
from onward.kernels import EagerPart, Target
from onward.plan import Budget, Fusible, Plan, make_plan
from onward.shards import PipelineCut, Shard


class Compiler:
    """The compilation stages as methods, for one target. disable: names of passes to skip. policy:
    where mixed precision places casts; None: fp32. mesh: the ranks that run the step together; one
    rank by default."""

    def __init__(
        self,
        target: Target,
        disable: Iterable[str] = (),
        journal: Journal | None = None,
        policy: rewrite.Policy | None = None,
        mesh: Mesh | None = None,
    ) -> None:
        load_plugins()
        self.target, self.disable = target, rewrite.switched_off(disable)
        self.policy, self.mesh = policy, Mesh() if mesh is None else mesh
        self._fusible = Fusible(target)
        self._here: Compiler | None = None
        self.journal = Journal() if journal is None else journal
        self.cache = GraphCache(target, self.disable, policy, self.mesh, self.journal)

    def capture(self, request: CaptureRequest) -> CapturedModule:
        """Captures the call of a module as a graph. Raises CaptureError for code that no graph can
        hold."""
        captured = capture_cache.kept(self.journal, capture, request)
        self.journal.note("capture", captured.graph, Stage.CAPTURED)
        return captured

    def evaluation(self, trained: CapturedModule) -> CapturedModule | None:
        """Derives the evaluation graph of a call that was captured in training mode. None where
        evaluation may differ by more than dropout (`onward.capture.evaluation`)."""
        with self.journal.timed("capture"):
            captured = evaluation(trained)
        if captured is not None:
            self.journal.note("capture", captured.graph, Stage.CAPTURED)
        return captured

    def quiet(self) -> Compiler:
        """A copy of this compiler with a silent journal, for helper graphs that are no stage of a
        step."""
        return self.noting(Journal(quiet=True))

    def noting(self, journal: Journal) -> Compiler:
        """A copy of this compiler that writes to another journal; its ranks exchange nothing."""
        mesh = self.mesh.on_paper()
        made = Compiler(self.target, self.disable, journal, self.policy, mesh)
        made._here = self._here
        return made

    def planning_for(self, target: Target) -> Compiler:
        """A copy of this compiler that plans for another device, which may be absent."""
        made = Compiler(target, self.disable, self.journal, self.policy, self.mesh)
        made._here = self.here.quiet()
        return made

    @property
    def here(self) -> Compiler:
        """The compiler of plans that run in this process, such as those that inspect a batch."""
        return self if self._here is None else self._here

    def forward(self, captured: Captured) -> Graph:
        """Rewrites the captured graph into canonical form; in mixed precision, also inserts the
        policy's casts."""
        policy = rewrite.policy_for(captured.graph, self.policy)

        def make() -> Graph:
            graph = self._rewrite(captured.graph, rewrite.FORWARD, "forward")
            if policy is None:
                return graph
            return self._rewrite(graph, rewrite.in_precision(policy), "precision")

        return self.cache.get_or_make("forward", captured.graph, (), make)

    def portable(self, captured: Captured) -> Graph:
        """Rewrites the captured graph for any ONNX engine: no fusions, which need Onward's kernels,
        but with the policy's casts."""
        return self._settled(self._unfused(captured), "portable")

    def portable_step(self, captured: Captured, recipe: Recipe) -> Graph:
        """Builds the whole training step as one graph for any ONNX engine, as `portable` does."""
        forward = self._unfused(captured)
        graph = add_updates(
            self._differentiate(forward, recipe.parameters, recipe.parameters), recipe
        )
        passes = rewrite.without_fusions(rewrite.STEP)
        return self._settled(self._rewrite(graph, passes, "step"), "step")

    def pack(
        self, forward: Graph, outputs: Sequence[str], watch: bool = False
    ) -> rewrite.PackedForward | None:
        """Returns the forward on the rows that these outputs read; None where they read every row,
        and where ranks have parts of sequences, whose positions are not packed.
        watch: the graph also reports whether anything reads the other rows
        (`rewrite.row_demand`)."""
        if "row_demand" in self.disable or splits_sequences(self.mesh):
            return None

        def make() -> rewrite.PackedForward | None:
            with self.journal.timed("pack"):
                packed, report = rewrite.row_demand(
                    forward, outputs, self._fusible, watch, self.target.records
                )
            self.journal.reports.append(report)
            if report.edits == 0:
                return None
            self.journal.note("pack-row_demand", packed.graph, Stage.PACKED)
            return packed

        return self.cache.get_or_make("pack", forward, (outputs, watch), make)

    def gradients(self, forward: Graph, wrt: Sequence[str], zeros: Collection[str]) -> Graph:
        """Returns forward and gradients without an update, for comparisons with other engines."""
        return self._rewrite(self._differentiate(forward, wrt, zeros), rewrite.STEP, "gradients")

    def halves(self, forward: Graph, ends: Sequence[str], wrt: Sequence[str]) -> Graph:
        """Returns forward and gradients with respect to `wrt` as one graph that runs in two halves:
        the cotangents of the outputs `ends` arrive after the forward has run. An input that `ends`
        do not depend on gets a gradient of zeros."""

        def make() -> Graph:
            graph = self._differentiate(forward, wrt, wrt, ends)
            graph.signature = graph.signature.but(split_halves=True)
            return self._rewrite(graph, rewrite.halves(), "halves")

        return self.cache.get_or_make("halves", forward, (ends, wrt), make)

    def step(self, forward: Graph, recipe: Recipe) -> Graph:
        """Builds the whole training step as one graph, this rank's where a mesh runs it. Raises
        OnwardError for a mesh that a step cannot be distributed over."""

        def make() -> Graph:
            if recipe.pipeline is None:
                start = self._padded(forward, recipe.cuts)
                graph = self._distribute(self._updated(start, self.joint(recipe)), recipe)
            else:
                graph = self._pipelined(forward, self.joint(recipe), recipe.pipeline)
            return self._rewrite(graph, rewrite.STEP, "step")

        return self.cache.get_or_make("step", forward, (recipe,), make)

    def tensor_cuts(
        self, forward: Graph, recipe: Recipe, mesh: Mesh, sizes: Mapping[str, int]
    ) -> dict[str, tuple[int, int]]:
        """Chooses how the ranks of a mesh cut parameters along `tp`: by name, the dim and its
        groups. Vocabulary tables may be cut into uneven parts, where their update is elementwise.
        sizes: of a batch, by symbol."""
        whole = [n for g in recipe.groups if not g.optimizer.elementwise for n in g.parameters]
        rows = tensor.paddable(forward, mesh.size(tensor.AXIS), whole)
        graph = self._updated(tensor.padded(forward, rows), recipe)
        found = chosen_cuts(graph, mesh, self._link_rates(), sizes)
        odd = {
            name for name in rows if name in found and found[name][0] == 0 and found[name][1] > 1
        }
        return {name: cut for name, cut in found.items() if name not in odd}

    def stages(
        self, forward: Graph, number: int, sizes: Mapping[str, int]
    ) -> dict[str, tuple[int, ...]]:
        """Chooses the stages of a pipeline: by parameter, those that read it. sizes: of a batch, by
        symbol. Raises OnwardError for a model that cannot be cut into so many stages."""
        return pipeline.chosen_stages(forward, number, Costs(self._link_rates(), number, sizes))

    def evaluated(
        self,
        forward: Graph,
        held: Mapping[str, Shard],
        cuts: Mapping[str, tuple[int, int]],
        stages: PipelineCut | None = None,
    ) -> Graph:
        """Builds the evaluation graph of one rank, which holds parts of the parameters only.

        held: parameters that ZeRO stage 3 shards; the rank has a flat piece of each. cuts:
        parameters that are split along a dim over `tp`. A parameter in both is a flat piece of its
        `tp` part. stages: the pipeline stages that hold each parameter.
        """
        if stages is not None:
            start = self._padded(forward, cuts)
            return pipeline.evaluation_rank(start, self.mesh, stages, cuts, held)
        graph = forward
        if cuts:
            graph = cut_along(self._padded(forward, cuts), self.mesh, cuts)
        inputs = {value.name for value in graph.inputs}
        parts = {name: shard for name, shard in held.items() if name in inputs}
        graph = gathered_ahead(graph, self.mesh, parts)
        number_in_order(graph)
        return graph

    def update(self, parameters: Mapping[str, Type], recipe: Recipe) -> Graph:
        """Builds the update alone, from the accumulated gradients, for a window that ends early.
        parameters: the types of the recipe's parameters, by graph input."""
        rows = tensor.rows_padded(parameters, recipe.cuts, self.mesh.size(tensor.AXIS))
        wide = {n: parameters[n].with_shape((k, *parameters[n].shape[1:])) for n, k in rows.items()}
        parameters = {**parameters, **wide}
        with self.journal.timed("updates"):
            if recipe.pipeline is None:
                graph = update_alone(parameters, self.joint(recipe))
                graph = self._distribute(graph, recipe)
            else:
                graph = self._update_of_stages(parameters, self.joint(recipe), recipe.pipeline)
        return self._rewrite(graph, rewrite.STEP, "step")

    def plan(
        self,
        graph: Graph,
        outputs: Iterable[str],
        dims: Mapping[str, int],
        budget: int | float | str | None = None,
        open: Collection[str] = (),
        label: str = "",
    ) -> Plan:
        """Plans the computation of these outputs at these sizes, within a budget of bytes. open:
        sizes that may be smaller at run time. label: prefix of the names of dumps."""
        sizes = {**dims, **length_parts(graph.symbols, dims)}
        with self.journal.timed("specialize"):
            specialized = rewrite.specialize(graph, sizes, open, outputs)
        self.journal.note(f"{label}specialize", specialized, Stage.SPECIALIZED)
        with self.journal.timed("plan"):
            plan = make_plan(specialized, dict(dims), target=self.target)
        if budget is not None:
            with self.journal.timed("recompute"):
                plan = self._fit(specialized, plan, budget)
        self.journal.note_plan(f"{label}plan", plan)
        return plan

    def bind(
        self, plan: Plan, memory: Memory, owned: Mapping[str, Any], parts: Sequence[EagerPart] = ()
    ) -> Executable:
        """Binds a plan to memory. owned: tensors that the user or the session owns, by graph input.
        parts: the model parts that the plan's regions run in PyTorch. A plan with open sizes is
        only reserved here, and bound in its first run with the sizes of that batch: its largest
        sizes may be ones that the model rejects, such as too many positions."""
        with self.journal.timed("bind"):
            executable = Executable(plan, memory, owned, parts, self.mesh)
            if plan.open:
                executable.reserve()
            else:
                executable.bind()
        return executable

    def bind_halves(
        self, plan: Plan, memory: Memory, owned: Mapping[str, Any], parts: Sequence[EagerPart] = ()
    ) -> ExecutableHalves:
        """Returns a plan that runs in two halves; each run binds it to a block of memory."""
        return ExecutableHalves(plan, memory, owned, parts)

    def joint(self, recipe: Recipe) -> Recipe:
        """Returns the recipe, with `joint` set where several ranks share each batch."""
        return replace(recipe, joint=shares_steps(self.mesh) or recipe.pipeline is not None)

    def splits_samples(self, recipe: Recipe) -> bool:
        """Says whether the graph of a rank has some of a batch's samples."""
        return self.mesh.batches > 1 or recipe.pipeline is not None

    def _updated(self, forward: Graph, recipe: Recipe) -> Graph:
        """The step of one rank alone: forward, gradients and updates."""
        start = summed(forward) if recipe.average == "labels" else forward
        graph = self._differentiate(start, recipe.parameters, recipe.parameters)
        with self.journal.timed("updates"):
            graph = add_updates(graph, recipe)
        self.journal.note("updates", graph)
        return graph

    def _pipelined(self, forward: Graph, recipe: Recipe, cut: PipelineCut) -> Graph:
        """The step of one rank of a pipeline: forward and gradients of its stages, cut before they
        are differentiated, and the update of its parameters."""

        def differentiate(graph: Graph, wrt: Sequence[str]) -> Graph:
            return self._differentiate(graph, wrt, wrt)

        require_shareable(forward, self.mesh)
        start = summed(self._padded(forward, recipe.cuts))
        made = pipeline.pipeline_rank(
            start, recipe.parameters, self.mesh, cut, differentiate, divisor_of_all, recipe.cuts,
            recipe.splits_positions,
        )  # fmt: skip
        own = recipe.only(pipeline.held_here(cut.holders, self.mesh))
        with self.journal.timed("updates"):
            graph = add_updates(made.graph, own)
        self.journal.note("updates", graph)
        return self._exchanged(graph, recipe, cut, made.messages, made.digest)

    def _update_of_stages(
        self, parameters: Mapping[str, Type], recipe: Recipe, cut: PipelineCut
    ) -> Graph:
        """The update alone of one rank of a pipeline, by the sums that it has of its stages."""
        own = recipe.only(pipeline.held_here(cut.holders, self.mesh))
        ranks, cuts = self.mesh.size(tensor.AXIS), recipe.cuts
        here = {
            n: tensor.Sharding(*cuts[n]).local(parameters[n], ranks) if n in cuts else parameters[n]
            for n in own.parameters
        }
        return self._exchanged(update_alone(here, own), recipe, cut)

    def _exchanged(
        self, graph: Graph, recipe: Recipe, cut: PipelineCut, messages: int = 0, digest: str = ""
    ) -> Graph:
        """Adds the exchanges that follow a pipeline's messages to the graph of one rank."""
        return pipeline.exchanged_sums(
            graph, self.mesh, cut.holders, messages, digest, recipe.parameters, recipe.shards,
            recipe.summed_parts, recipe.cuts, recipe.held,
        )  # fmt: skip

    def _link_rates(self) -> DeviceRates:
        rates = self.target.rates
        return link_rates(self.target.device, rates.flops_per_second, rates.bytes_per_second)

    def _padded(self, forward: Graph, cuts: Mapping[str, tuple[int, int]]) -> Graph:
        """Pads vocabulary tables that ranks split by rows, so that each rank has as many rows."""
        types = {v.name or "": type_of(v) for v in forward.inputs_with(Role.PARAM)}
        ranks = self.mesh.size(tensor.AXIS)
        return tensor.padded(forward, tensor.rows_padded(types, cuts, ranks))

    def _distribute(self, graph: Graph, recipe: Recipe) -> Graph:
        cut = recipe.shards, recipe.summed_parts, recipe.held, recipe.cuts
        return distribute(
            graph, self.mesh, recipe.average, *cut, adaptive=recipe.adasum,
            sequence=recipe.splits_positions, attention=recipe.attention,
        )  # fmt: skip

    def _unfused(self, captured: Captured) -> Graph:
        passes = [*rewrite.FORWARD]
        if self.policy is not None:
            passes += rewrite.in_precision(self.policy)
        return self._rewrite(captured.graph, rewrite.without_fusions(passes), "portable")

    def _settled(self, graph: Graph, stage: str) -> Graph:
        """Replaces ops that other engines compute wrongly."""
        last = rewrite.Pass(rewrite.scatter_elements, exact=False)
        return self._rewrite(graph, [last], stage)

    def _differentiate(
        self, graph: Graph, wrt: Sequence[str], zeros: Collection[str], ends: Sequence[str] = ()
    ) -> Graph:
        with self.journal.timed("differentiate"):
            graph = vjp(graph, ends or graph.signature.differentiated_outputs, wrt, zeros)
        self.journal.note("differentiate", graph)
        return graph

    def _rewrite(self, graph: Graph, passes: Sequence[rewrite.AnyPass], stage: str) -> Graph:
        after, check = partial(self.journal.note_pass, stage), environment().check
        with self.journal.timed(stage):
            graph, reports = rewrite.run(graph, passes, self.disable, after, check, self._fusible)
        self.journal.reports += reports
        self.journal.ends(Stage(stage), graph)
        return graph

    def _fit(self, specialized: Graph, plan: Plan, amount: int | float | str) -> Plan:
        """Recomputes more and more values, planning after each, until the plan fits the budget: the
        only feedback from a later stage to an earlier one."""
        budget = Budget(specialized, plan, amount, self.target)
        for graph, values in budget.proposals():
            again = partial(rewrite.recompute, graph, values)
            report = rewrite.measured("recompute", graph, lambda _, again=again: again())
            budget.judge(make_plan(graph, plan.dims, target=self.target), graph, report)
        if budget.chosen is None:
            return plan
        self.journal.reports.append(budget.chosen.what)
        self.journal.note("recompute", budget.chosen.graph, Stage.SPECIALIZED)
        return budget.chosen.plan
