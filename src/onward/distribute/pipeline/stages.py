"""Stages: consecutive pieces of a forward, of about equal time, and the parameters of each.

A node that reads parameters, or what follows from them, is placed on one stage. What follows from
the batch and from constants alone without products (masks, positions), casts of a parameter, and
views of anything belong to no stage: each stage that reads them computes them again.

Where the forward is cut is chosen once, for the graph and the sizes of one batch (`chosen_stages`).
What is kept of the choice is the stages that hold each parameter; every forward of the model, such
as that of an evaluation, then follows from it (`stage_of_nodes`): a node is on the first stage that
has its inputs and its parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onward.distribute.tensor.conversions import Costs
from onward.errors import OnwardError
from onward.graph.graph import Graph, Node, Role, Value, type_of, where
from onward.graph.names import user_name
from onward.graph.ops import OPS, flops, moved

Holders = Mapping[str, tuple[int, ...]]  # by parameter, the stages that read it


class ForwardNodes:
    """The nodes of a forward, as they are placed or not.

    placed: those that belong to one stage, in order. parameters: by value that is a parameter, or
    follows from one parameter alone by views and casts, its name. shown: by value that is a view of
    what a placed node makes, that.
    """

    def __init__(self, graph: Graph) -> None:
        self.parameters: dict[Value, str] = {
            value: value.name or "" for value in graph.inputs_with(Role.PARAM)
        }
        self.placed: dict[Node, None] = {}
        self.shown: dict[Value, Value] = {}
        bound: set[Value] = set(self.parameters)  # values that follow from parameters
        for node in graph:
            inputs = [x for x in node.inputs if x is not None]
            if not any(x in bound for x in inputs):
                if flops(node) == 0:
                    continue
            elif not any(x in bound for x in inputs[1:]) and self._follows(node, inputs[0]):
                bound.update(node.outputs)
                continue
            bound.update(node.outputs)
            self.placed[node] = None

    def read(self, node: Node) -> list[str]:
        """The parameters that a node reads, or of which it reads what follows from them."""
        found = (self.parameters.get(x) for x in node.inputs if x is not None)
        return list(dict.fromkeys(name for name in found if name is not None))

    def operands(self, node: Node) -> list[Value]:
        """What placed nodes have made that a node reads, itself or a view of it."""
        found = (self.shown.get(x, x) for x in node.inputs if x is not None)
        return list(dict.fromkeys(x for x in found if x.producer() in self.placed))

    def _follows(self, node: Node, x: Value) -> bool:
        """Records a node that is a view of x, or a cast of a parameter; returns whether it is."""
        op, source = OPS[node.op_type], self.parameters.get(x)
        is_view = op.view or op.reshapes or node.op_type == "Identity"
        if source is not None and (is_view or node.op_type in ("Cast", "StopGradient")):
            self.parameters.update(dict.fromkeys(node.outputs, source))
            return True
        if source is None and is_view:
            self.shown.update(dict.fromkeys(node.outputs, self.shown.get(x, x)))
            return True
        return False


@dataclass(frozen=True)
class _Pieces:
    """What pieces of the placed nodes cost. before: the time of the nodes before each place.
    crossing: the time to send what is made before it and read behind it, there and back. own: the
    nodes before it that read a parameter which no other node reads; each piece has one, since it is
    by its parameters that a stage is known again."""

    before: list[float]
    crossing: list[float]
    own: list[int]

    def cost(self, start: int, stop: int) -> float:
        """The time of a piece with what it receives."""
        return self.before[stop] - self.before[start] + self.crossing[start]


def chosen_stages(graph: Graph, stages: int, costs: Costs) -> dict[str, tuple[int, ...]]:
    """Chooses the stages of a forward graph; returns the stages that hold each parameter.

    costs: of work and links, at the sizes of a batch. The time of the slowest stage is the least
    that there is. Raises OnwardError where the graph has fewer pieces than stages.
    """
    nodes = ForwardNodes(graph)
    placed = list(nodes.placed)
    pieces = _measured(nodes, costs)
    cuts = _cuts(pieces, _places(pieces.crossing, stages), stages)
    if cuts is None:
        raise OnwardError(
            f"the model has {pieces.own[-1]} layers with parameters of their own, which do not "
            f"make {stages} stages of a pipeline; fix: fewer ranks along pp"
        )
    holders: dict[str, set[int]] = {}
    for stage, (start, stop) in enumerate(zip([0, *cuts], [*cuts, len(placed)], strict=True)):
        for node in placed[start:stop]:
            for name in nodes.read(node):
                holders.setdefault(name, set()).add(stage)
    given = {name: tuple(sorted(held)) for name, held in holders.items()}
    return holders_of(graph, stage_of_nodes(graph, given))


def _measured(nodes: ForwardNodes, costs: Costs) -> _Pieces:
    placed = list(nodes.placed)
    lasts = {x: i for i, node in enumerate(placed) for x in nodes.operands(node)}
    readers = Counter(name for node in placed for name in nodes.read(node))
    before, change, own = [0.0], [0.0] * (len(placed) + 1), [0]
    for i, node in enumerate(placed):
        own.append(own[-1] + any(readers[name] == 1 for name in nodes.read(node)))
        work = costs.work(costs.number(flops(node)), costs.number(moved(node)))
        before.append(before[-1] + 3 * work)  # the backward takes about twice as long
        for y in node.outputs:
            last = lasts.get(y, i)
            seconds = 2 * costs.nbytes(type_of(y)) / costs.rates.link_bytes_per_second
            change[i + 1] += seconds
            change[last + 1 if last > i else i + 1] -= seconds
    crossing, total = [], 0.0
    for seconds in change:
        total += seconds
        crossing.append(max(total, 0.0))
    return _Pieces(before, crossing, own)


def _places(crossing: Sequence[float], stages: int) -> list[int]:
    """The places where a cut may be: those across which less is sent than across their neighbours,
    or all of them where these are too few."""
    end = len(crossing) - 1
    inner = range(1, end)
    low = [
        i for i in inner
        if crossing[i] <= crossing[i - 1] * (1 + 1e-9) or i == 1
        if crossing[i] <= crossing[i + 1] * (1 + 1e-9) or i == end - 1
    ]  # fmt: skip
    return low if len(low) >= 4 * stages else list(inner)


def _cuts(pieces: _Pieces, places: Sequence[int], stages: int) -> list[int] | None:
    """The places of the cuts for which the slowest stage is fastest and, among these, the least is
    sent; None where there are too few places."""
    end = len(pieces.before) - 1
    # by place: the time of the slowest stage up to it, the time of sending, the cuts so far
    found: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage in range(stages):
        ends = [end] if stage == stages - 1 else places
        following: dict[int, tuple[float, float, list[int]]] = {}
        for stop in ends:
            ways = [
                (max(slowest, pieces.cost(start, stop)), sent + pieces.crossing[start], cuts)
                for start, (slowest, sent, cuts) in found.items()
                if pieces.own[start] < pieces.own[stop]
            ]
            if ways:
                slowest, sent, cuts = min(ways, key=lambda way: way[:2])
                following[stop] = slowest, sent, [*cuts, stop]
        found = following
    return found[end][2][:-1] if end in found else None


def stage_of_nodes(graph: Graph, holders: Holders) -> dict[Node, int]:
    """The stage of each placed node of a forward: the first that all of its inputs come before or
    are on, and that holds its parameters. Raises OnwardError where no stage holds them all."""
    nodes = ForwardNodes(graph)
    found: dict[Node, int] = {}
    for node in nodes.placed:
        makers = [x.producer() for x in nodes.operands(node)]
        first = max((found[m] for m in makers if m in found), default=0)
        names = nodes.read(node)
        unknown = next((name for name in names if name not in holders), None)
        held = [set(holders.get(name, ())) for name in names]
        stages = sorted(s for s in set.intersection(*held) if s >= first) if held else [first]
        if unknown is not None or not stages:
            read = ", ".join(user_name(name) for name in names)
            raise OnwardError(
                f"{node.op_type} of {where(node) or 'the model'} needs {read} on one stage of the "
                "pipeline, and no stage has that: stages are chosen by the first batch; fix: "
                "batches that all use its layers in its order"
            )
        found[node] = stages[0]
    return found


def holders_of(graph: Graph, stages: Mapping[Node, int]) -> dict[str, tuple[int, ...]]:
    """By parameter, the stages whose nodes read it."""
    nodes = ForwardNodes(graph)
    held: dict[str, set[int]] = {}
    for node, stage in stages.items():
        for name in nodes.read(node):
            held.setdefault(name, set()).add(stage)
    return {name: tuple(sorted(found)) for name, found in sorted(held.items())}


def stages_without(holders: Holders, stages: int, trained: Iterable[str]) -> list[int]:
    """The stages that hold none of the trained parameters."""
    held = {stage for name in trained for stage in holders.get(name, ())}
    return [stage for stage in range(stages) if stage not in held]


def shared_memory(name: str) -> OnwardError:
    """The refusal of a weight that a rank of another stage cannot let go of. name: the user's."""
    return OnwardError(
        f"{name} shares its memory with another tensor of the model, and each rank along pp lets "
        "go of the weights of other stages; fix: weights with memory of their own"
    )


def whole_updates(said: str) -> OnwardError:
    """The refusal of an optimizer that reads whole parameters, beside `tp`. said: its name."""
    return OnwardError(
        f"{said} reads all of a parameter, of which ranks along tp have parts beside pp; fix: pp "
        "without tp, or an optimizer such as AdamW"
    )


def own_steps(why: str) -> OnwardError:
    """The refusal of an optimizer without an update in the graph. why: it has none."""
    return OnwardError(
        f"{why}, and each rank along pp holds the weights of its stages alone; fix: an optimizer "
        "with an update in the graph"
    )


__all__ = [
    "ForwardNodes", "Holders", "chosen_stages", "holders_of", "own_steps", "shared_memory",
    "stage_of_nodes", "stages_without", "whole_updates",
]  # fmt: skip
