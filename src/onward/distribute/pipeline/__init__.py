"""Pipeline parallelism (GPipe, arXiv 1811.06965): the layers of a model on several ranks, and the
micro-batches of a batch one behind the other.

In:  a forward whose loss is a sum, a schedule, and the stages that hold each parameter
Out: the graph of one rank for the whole step, to which the update is added as to any other

`stages` chooses where a forward is cut, `staged_forward` marks its nodes so that it can be
differentiated, `partition` finds what each stage computes of the gradients, `schedules` has tables
of who runs what when, `messages` what is sent, `write` writes the rank's graph, and `sums` what all
ranks exchange behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from onward.distribute import tensor
from onward.distribute.context import context_parallel
from onward.distribute.mesh import Mesh
from onward.distribute.parameter_gathers import gathered_ahead
from onward.distribute.pipeline.schedules import INTERLEAVED, SCHEDULES, Action, Part, schedule
from onward.distribute.pipeline.staged_forward import StagedForward, staged
from onward.distribute.pipeline.stages import (
    Holders,
    chosen_stages,
    own_steps,
    shared_memory,
    stages_without,
    whole_updates,
)
from onward.distribute.pipeline.sums import (
    exchanged_loss,
    exchanged_sums,
    ranks_of_stages,
    tied,
)
from onward.distribute.pipeline.write import (
    AXIS,
    JoinDivisors,
    RankProgram,
    batch_names,
    micro_symbols,
    rows_of,
    write_rank,
)
from onward.errors import OnwardError
from onward.graph.graph import Graph
from onward.shards import PipelineCut, Shard

Differentiate = Callable[[Graph, Sequence[str]], Graph]


def pipeline_rank(
    forward: Graph,
    parameters: Sequence[str],
    mesh: Mesh,
    cut: PipelineCut,
    differentiate: Differentiate,
    join_divisors: JoinDivisors,
    cuts: Mapping[str, tuple[int, int]] | None = None,
    sequence: bool = False,
) -> RankProgram:
    """Writes forward and gradients of one rank along `pp`.

    forward: its loss is a sum, with a divisor (`Signature.divisor`). parameters: those to be
    trained. cut: the schedule, and the stages that hold each parameter. differentiate: returns
    a graph with the gradients with respect to these inputs, or zeros. join_divisors: makes one
    divisor of those of all micro-batches. cuts: by parameter, the dim along which ranks of `tp`
    have a part each, and the number of groups of it. sequence: whether ranks along `tp` also have
    parts of the positions. Ranks along `cp` have parts of them in any case. Raises OnwardError for
    a forward that does not fit the stages, and for a stage that trains nothing.
    """
    ranks = mesh.size(AXIS)
    table = schedule(cut.schedule, ranks, cut.micro_batches, cut.stages_per_rank)
    lacking = stages_without(cut.holders, ranks * cut.stages_per_rank, parameters)
    if lacking:
        raise OnwardError(
            f"stage {lacking[0]} of the pipeline trains no parameter, so that no gradient passes "
            "it; fix: fewer ranks along pp, or train a parameter of every layer"
        )
    found = staged(forward, cut.holders)
    inputs = [name for parameter in parameters for name in found.inputs_of(parameter)]
    graph = _cut_along_tp(differentiate(found.graph, inputs), found, mesh, cuts or {}, sequence)
    graph = context_parallel(graph, mesh)
    return write_rank(found, graph, mesh, table, join_divisors)


def evaluation_rank(
    forward: Graph, mesh: Mesh, cut: PipelineCut,
    cuts: Mapping[str, tuple[int, int]] | None = None, held: Mapping[str, Shard] | None = None,
) -> Graph:  # fmt: skip
    """Writes the forward of one rank along `pp`, whose loss every rank has in the end; the batch is
    one. cuts: as in `pipeline_rank`. held: by parameter, the part of it that this rank has, as one
    row. Raises OnwardError for a forward that does not fit the stages."""
    if forward.signature.loss is None:
        raise OnwardError(
            "an evaluation along pp gives the loss alone, and this batch has none; fix: give labels"
        )
    ranks = mesh.size(AXIS)
    stages = range(ranks * cut.stages_per_rank)
    table = [[Action(Part.FORWARD, s, 0) for s in stages if s % ranks == r] for r in range(ranks)]
    found = staged(forward, cut.holders)
    made = write_rank(found, _cut_along_tp(found.graph, found, mesh, cuts or {}), mesh, table)
    inputs = {value.name for value in made.graph.inputs}
    parts = {name: shard for name, shard in (held or {}).items() if name in inputs}
    graph = gathered_ahead(made.graph, mesh, parts)
    return exchanged_loss(graph, mesh, made.messages, made.digest)


def _cut_along_tp(
    graph: Graph, found: StagedForward, mesh: Mesh, cuts: Mapping[str, tuple[int, int]],
    sequence: bool = False,
) -> Graph:  # fmt: skip
    """What this rank along `tp` runs of all stages: each stage reads its own input of a weight, cut
    like the weight."""
    given = {
        name: tensor.Sharding(*cuts[held]) for (held, _), name in found.inputs.items()
        if held in cuts
    }  # fmt: skip
    return tensor.tensor_parallel(graph, mesh, cuts=given, sequence=sequence)[0]


def held_here(holders: Holders, mesh: Mesh) -> set[str]:
    """The parameters that stages of this rank read."""
    ranks, place = mesh.size(AXIS), mesh.coordinate(AXIS)
    return {name for name, held in holders.items() if place in ranks_of_stages(held, ranks)}


__all__ = [
    "AXIS", "INTERLEAVED", "SCHEDULES", "Holders", "RankProgram", "StagedForward", "batch_names",
    "chosen_stages", "evaluation_rank", "exchanged_sums", "held_here", "micro_symbols",
    "own_steps", "pipeline_rank", "ranks_of_stages", "rows_of", "schedule", "shared_memory",
    "staged", "tied", "whole_updates", "write_rank",
]  # fmt: skip
