"""Partition: which stage and which part of its work each node of forward and gradients belongs to.

A node of the backward is on the stage of the node that it derives: `vjp` hands the mark `stage` on.
So it finds there what it reads of the forward, and gradients come from the same stage or a later
one. In a backward in two parts, INPUT is what gradients of other stages depend on, and WEIGHT is
the rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from onward.distribute.pipeline.schedules import Part
from onward.graph.graph import Graph, Node, Role, Value


@dataclass(frozen=True)
class Crossing:
    """A value that one stage makes and another reads. part: of the reader, which is its first where
    there are several."""

    value: Value
    source: int
    target: int
    part: Part


@dataclass
class Partition:
    """The stage and the part (FORWARD, INPUT or WEIGHT) of each node; nodes without a stage compute
    the loss's divisor. gradients: by name of a parameter's input, the value that is its
    gradient."""

    graph: Graph
    stage: dict[Node, int] = field(default_factory=dict)
    part: dict[Node, Part] = field(default_factory=dict)
    gradients: dict[str, Value] = field(default_factory=dict)

    def nodes(self, stage: int, *parts: Part) -> list[Node]:
        """The nodes of a stage in these parts, in the order of the graph."""
        return [n for n in self.stage if self.stage[n] == stage and self.part[n] in parts]

    def crossings(self) -> Iterator[Crossing]:
        """The values that go from one stage to another, each once for each stage that reads it.
        Values of the forward go to later stages, gradients to earlier ones."""
        order = [Part.FORWARD, Part.INPUT, Part.WEIGHT]
        for node, source in self.stage.items():
            for value in node.outputs:
                found: dict[int, Part] = {}
                for reader in value.consumers():
                    target = self.stage[reader]
                    if target != source:
                        parts = [self.part[reader], found.get(target, Part.WEIGHT)]
                        found[target] = min(parts, key=order.index)
                is_forward = self.part[node] is Part.FORWARD
                for target in sorted(found, reverse=not is_forward):
                    up = target > source
                    assert up == is_forward, f"{node.name} of stage {source} is read on {target}"
                    yield Crossing(value, source, target, found[target])


def partition(graph: Graph, stage_of_input: Mapping[str, int]) -> Partition:
    """Finds the stage and the part of each node of a forward with gradients. stage_of_input: of
    each input that is a parameter."""
    made = Partition(graph)
    signature = graph.signature
    made.gradients = {name: graph.outputs[out] for name, out in signature.gradients.items()}
    own = _of_gradients(made.gradients, stage_of_input)
    late = _behind_cotangents(graph)
    for node in graph:
        stage = node.meta.get("stage", own.get(node))
        if stage is None:  # of the divisor
            continue
        made.stage[node] = int(stage)
        is_late = node in late or bool(node.meta.get("backward"))
        made.part[node] = Part.WEIGHT if is_late else Part.FORWARD
    stack = [
        node for node, stage in made.stage.items()
        if made.part[node] is Part.WEIGHT
        and any(made.stage[r] != stage for y in node.outputs for r in y.consumers())
    ]  # fmt: skip
    while stack:
        node = stack.pop()
        if made.part[node] is Part.WEIGHT:
            made.part[node] = Part.INPUT
            makers = [x.producer() for x in node.inputs if x is not None]
            stack += [m for m in makers if m is not None and made.part.get(m) is Part.WEIGHT]
    return made


def _behind_cotangents(graph: Graph) -> set[Node]:
    """The nodes that depend on a cotangent."""
    reached: set[Value] = set(graph.inputs_with(Role.COTANGENT))
    found: set[Node] = set()
    for node in graph:
        if any(x in reached for x in node.inputs):
            found.add(node)
            reached.update(node.outputs)
    return found


def _of_gradients(
    gradients: Mapping[str, Value], stage_of_input: Mapping[str, int]
) -> dict[Node, int]:
    """The stages of nodes without a mark between a node that is derived and a gradient: casts, and
    zeros of parameters that no gradient reaches."""
    found: dict[Node, int] = {}
    for name, value in gradients.items():
        stack = [value.producer()]
        while stack:
            node = stack.pop()
            if node is not None and "stage" not in node.meta and node not in found:
                found[node] = stage_of_input[name]
                stack += [x.producer() for x in node.inputs if x is not None]
    return found


__all__ = ["Crossing", "Partition", "partition"]
