"""A forward whose nodes know their stages, so that it can be differentiated and then cut."""

from __future__ import annotations

from dataclasses import dataclass, field

from onward.distribute.pipeline.stages import ForwardNodes, Holders, stage_of_nodes
from onward.graph.graph import Graph, Node, Role, Value, array_of, role_of, type_of


@dataclass(frozen=True)
class StagedForward:
    """A forward in which every node has its stage as mark `stage`.

    Nodes that belong to no stage have a copy on each stage that reads them; those without a mark
    compute the loss's divisor alone. A parameter that several stages read has an input for each of
    them, so that each stage has a gradient of its own. inputs: by parameter and stage, the name of
    that input. Outputs are the loss and its divisor.
    """

    graph: Graph
    inputs: dict[tuple[str, int], str] = field(default_factory=dict)

    def inputs_of(self, parameter: str) -> list[str]:
        """The inputs of all stages that read a parameter."""
        return [name for (held, _), name in self.inputs.items() if held == parameter]


def staged(forward: Graph, holders: Holders) -> StagedForward:
    """Returns a copy of a forward with its stages. holders: by parameter, the stages that hold
    it. Raises OnwardError where the forward does not fit them."""
    graph = forward.clone()
    _keep_loss(graph)
    nodes = ForwardNodes(graph)
    stages = stage_of_nodes(graph, holders)
    made = StagedForward(graph)
    twins: dict[tuple[Value, int], Value] = {}

    def at(value: Value, stage: int) -> Value:
        """The value as a stage reads it."""
        maker = value.producer()
        if (value, stage) in twins or maker in stages or array_of(value) is not None:
            return twins.get((value, stage), value)
        if maker is None:
            found = _parameter_at(made, value, stage) if role_of(value) is Role.PARAM else value
            twins[value, stage] = found
            return found
        inputs = [None if x is None else at(x, stage) for x in maker.inputs]
        twin = _twin(maker, inputs, stage)
        graph.ir.insert_before(maker, twin)
        twins.update({(y, stage): t for y, t in zip(maker.outputs, twin.outputs, strict=True)})
        return twins[value, stage]

    for node in nodes.placed:
        stage = node.meta["stage"] = stages[node]
        for i, x in enumerate(node.inputs):
            if x is not None:
                node.replace_input_with(i, at(x, stage))
    graph.sweep()
    return made


def _keep_loss(graph: Graph) -> None:
    """Leaves the loss, under all of its names, and its divisor among the outputs."""
    signature = graph.signature
    loss = graph.outputs[signature.differentiated_outputs[0]]
    divisor = signature.divisor
    kept = {n: v for n, v in graph.outputs.items() if v is loss or n == divisor}
    graph.outputs, graph.state = kept, {}
    graph.signature = signature.within({v.name or "" for v in graph.inputs}, kept)
    graph.sweep()


def _parameter_at(made: StagedForward, value: Value, stage: int) -> Value:
    """The input for a parameter on a stage: its own on the first that reads it."""
    name, graph = value.name or "", made.graph
    key = (name, stage)
    if key not in made.inputs:
        is_first = not any(held == name for held, _ in made.inputs)
        found = value
        if not is_first:
            found = graph.input(f"{name}@{stage}", type_of(value), Role.PARAM)
        made.inputs[key] = found.name or ""
    return graph.find_input(made.inputs[key])


def _twin(node: Node, inputs: list[Value | None], stage: int) -> Node:
    """A copy of a node for a stage."""
    outputs = [Value(name=f"{y.name}@{stage}") for y in node.outputs]
    for y, twin in zip(node.outputs, outputs, strict=True):
        twin.meta.update(y.meta)
    made = Node(
        node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=outputs,
        name=f"{node.name}@{stage}", metadata_props=dict(node.metadata_props),
    )  # fmt: skip
    made.meta.update(node.meta)
    made.meta["stage"] = stage
    return made


__all__ = ["StagedForward", "staged"]
