"""Where a forward is cut into stages, what each node of its backward belongs to, and what ranks
send one another."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise, product

import pipelined_steps as pipes
import pytest
import sharded_steps as steps

from onward.differentiate import summed, vjp
from onward.distribute.pipeline.messages import messages_of
from onward.distribute.pipeline.partition import Partition, partition
from onward.distribute.pipeline.schedules import Part, schedule, timeline
from onward.distribute.pipeline.staged_forward import StagedForward, staged
from onward.distribute.pipeline.stages import ForwardNodes, chosen_stages, stage_of_nodes
from onward.distribute.tensor.conversions import Costs, DeviceRates
from onward.errors import OnwardError
from onward.graph.build import Builder
from onward.graph.graph import Graph, Node, Role, Value, array_of, role_of
from onward.graph.ops import flops
from onward.graph.types import parse_type

pytestmark = pytest.mark.usefixtures("captures_kept")
KINDS = ("gpt2", "bert", "t5", "llama")
SLOW = DeviceRates(1e8, 1e9, 1e-7, link_bytes_per_second=1e6, hop_seconds=1e-6)


def parted(kind: str, stages: int, layers: int) -> tuple[StagedForward, Partition]:
    model = steps.made(kind, layers=layers)
    made = staged(summed(model.call.forward), pipes.holders_of(model, stages))
    wrt = list(made.inputs.values())
    graph = vjp(made.graph, made.graph.signature.differentiated_outputs, wrt, wrt)
    return made, partition(graph, {name: s for (_, s), name in made.inputs.items()})


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_each_node_finds_its_inputs_on_its_stage_or_they_are_sent(kind: str, stages: int) -> None:
    """Forward values go up, gradients go down; parameters and the batch are where they are read;
    and the gradient of a stage's parameter is made there."""
    made, found = parted(kind, stages, stages)
    stage_of_input = {name: s for (_, s), name in made.inputs.items()}
    for node, stage in found.stage.items():
        late = found.part[node] is not Part.FORWARD
        for x in node.inputs:
            maker = None if x is None else x.producer()
            if maker is not None:
                other = found.stage[maker]
                assert other == stage or (other > stage) == (found.part[maker] is not Part.FORWARD)
                assert late or found.part[maker] is Part.FORWARD
            elif x is not None and role_of(x) is Role.PARAM:
                assert stage_of_input[x.name or ""] == stage
    for name, value in found.gradients.items():
        maker = value.producer()
        assert maker is None or found.stage[maker] == stage_of_input[name]
    assert {found.stage[n] for n in found.stage} == set(range(stages))


@pytest.mark.parametrize("kind", KINDS)
def test_only_one_part_of_a_backward_is_waited_for(kind: str) -> None:
    """No gradient of a lower stage depends on WEIGHT, and products are in both parts."""
    _, found = parted(kind, 3, 3)
    for node, stage in found.stage.items():
        for y in node.outputs:
            for reader in y.consumers():
                if found.part[node] is Part.WEIGHT:
                    assert found.part[reader] is Part.WEIGHT and found.stage[reader] == stage
    for stage in (1, 2):
        products = [n for n in found.stage if found.stage[n] == stage and flops(n) != 0]
        parts = [found.part[n] for n in products]
        assert parts.count(Part.INPUT) and parts.count(Part.WEIGHT)
    assert not found.nodes(0, Part.INPUT)  # nobody waits for gradients of the first stage


@pytest.mark.parametrize("stages", [2, 4, 8])
@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_layers_are_in_order_and_shared_evenly(kind: str, stages: int) -> None:
    model = steps.made(kind, layers=8)
    holders = pipes.holders_of(model, stages)
    last, of_layer = 0, dict[int, set[int]]()
    for name, held in holders.items():
        layer = re.search(r"\.(\d+)\.", name)
        if layer:
            of_layer.setdefault(int(layer[1]), set()).update(held)
    for layer in range(8):
        assert min(of_layer[layer]) >= last
        last = max(of_layer[layer])
    sizes = [sum(s in held for held in of_layer.values()) for s in range(stages)]
    assert max(sizes) <= 8 // stages + 2


@pytest.mark.parametrize("kind", ["gpt2", "bert", "llama"])
def test_slow_links_put_cuts_where_one_value_crosses(kind: str) -> None:
    model = steps.made(kind, layers=4)
    forward = summed(model.call.forward)
    holders = chosen_stages(forward, 3, Costs(SLOW, 3, steps.SIZES))
    found = stage_of_nodes(forward, holders)
    crossing: dict[tuple[int, int], set[Value]] = {}
    for node, stage in found.items():
        for x in node.inputs:
            maker = None if x is None else x.producer()
            if x is not None and maker in found and found[maker] != stage:
                crossing.setdefault((found[maker], stage), set()).add(x)
    assert {pair: len(values) for pair, values in crossing.items()} == {(0, 1): 1, (1, 2): 1}


def test_the_slowest_stage_is_as_fast_as_it_can_be() -> None:
    """Against all cuts of a chain of products, tried one by one."""
    graph = Graph()
    b, value = Builder(graph), graph.input("batch.x", parse_type("f32[B,4]"), Role.BATCH)
    widths = [4, 64, 8, 8, 128, 4, 16, 4]
    for i, (rows, columns) in enumerate(pairwise(widths)):
        kind = parse_type(f"f32[{rows},{columns}]")
        value = b.MatMul(value, graph.input(f"param.w{i}", kind, Role.PARAM))
    loss = graph.output("loss", b.ReduceSum(value, keepdims=0))
    graph.signature = graph.signature.but(loss=loss)
    rates = DeviceRates(1e8, 1e12, 0.0, link_bytes_per_second=1e15)
    costs = Costs(rates, 3, {"B": 8})
    work = [costs.number(flops(n)) for n in graph if n.op_type == "MatMul"]
    found = chosen_stages(graph, 3, costs)
    times = [0.0] * 3
    for i, flop in enumerate(work):
        [stage] = found[f"param.w{i}"]
        times[stage] += flop
    ways = [(i, j) for i, j in product(range(1, 7), repeat=2) if i < j]
    best = min(max(sum(work[:i]), sum(work[i:j]), sum(work[j:])) for i, j in ways)
    assert max(times) == best
    with pytest.raises(OnwardError, match=r"has 7 layers .*, which do not make 8 stages"):
        chosen_stages(graph, 8, costs)


def test_what_needs_no_parameter_is_computed_on_each_stage() -> None:
    """Masks and positions are not sent: what crosses follows from parameters."""
    for kind in KINDS:
        made, found = parted(kind, 3, 3)
        for crossing in found.crossings():
            assert _reads_parameter(crossing.value), crossing.value.name
        copies = [n for n in made.graph if n.meta.get("stage") and n.name and "@" in n.name]
        assert kind not in ("bert", "t5") or copies


def _reads_parameter(value: Value) -> bool:
    stack, seen = [value], set[Value]()
    while stack:
        value = stack.pop()
        if role_of(value) in (Role.PARAM, Role.COTANGENT):
            return True
        maker = value.producer()
        if maker is not None and value not in seen:
            seen.add(value)
            stack += [x for x in maker.inputs if x is not None and array_of(x) is None]
    return False


def test_the_encoders_output_goes_to_each_stage_of_the_decoder() -> None:
    _, found = parted("t5", 4, 2)
    targets: dict[Value, set[int]] = {}
    for crossing in found.crossings():
        if crossing.part is Part.FORWARD:
            targets.setdefault(crossing.value, set()).add(crossing.target)
    assert max(len(found) for found in targets.values()) >= 2


@pytest.mark.parametrize(("name", "stages"), [("GPipe", 1), ("1F1B", 1), ("Interleaved1F1B", 2),
                                              ("InterleavedZeroBubble", 2)])  # fmt: skip
@pytest.mark.parametrize("kind", KINDS)
def test_messages_of_each_rank_are_numbered_in_its_order(kind: str, name: str, stages: int) -> None:
    """A rank sends with rising numbers, and before an action runs that needs a message it has sent
    all with lower numbers: the condition under which no rank waits for ever."""
    ranks, micro_batches = 2, 4
    _, found = parted(kind, ranks * stages, ranks * stages)
    table = schedule(name, ranks, micro_batches, stages)
    messages = messages_of(found, table, timeline(table))
    assert [m.number for m in messages] == list(range(1, len(messages) + 1))
    for rank, actions in enumerate(table):
        place = {action: i for i, action in enumerate(actions)}
        sent = [place[m.sent] for m in messages if m.source == rank]
        assert sent == sorted(sent)
        for message in (m for m in messages if m.target == rank):
            earlier = [m for m in messages if m.source == rank and m.number < message.number]
            assert all(place[m.sent] < place[message.needed] for m in earlier)
    pairs = {(c.value, c.target % ranks) for c in found.crossings()
             if c.source % ranks != c.target % ranks}  # fmt: skip
    assert len(messages) == micro_batches * len(pairs)


def test_another_order_of_layers_is_refused() -> None:
    model = steps.made("gpt2", layers=2)
    forward = summed(model.call.forward)
    holders = dict(pipes.holders_of(model, 2))
    name = "param.transformer.h.0.mlp.c_fc.weight"
    with pytest.raises(OnwardError, match=r"Gemm of .*mlp.* needs .*c_fc\.weight.*; fix: batches"):
        stage_of_nodes(forward, {n: h for n, h in holders.items() if n != name})
    turned = {**holders, "param.transformer.h.0.ln_1.weight": (1,)}
    with pytest.raises(OnwardError, match="on one stage of the pipeline, and no stage has that"):
        stage_of_nodes(forward, turned)


def test_nodes_that_are_placed_follow_from_parameters() -> None:
    model = steps.made("bert", layers=2)
    forward = summed(model.call.forward)
    nodes = ForwardNodes(forward)
    others: list[Node] = [n for n in forward if n not in nodes.placed]
    assert others and not any(flops(n) != 0 for n in others)
    assert {n.op_type for n in nodes.placed} >= {"Gather", "Gemm"}
    cut = pipes.cut_of(model, 2, "GPipe", 2)
    assert replace(cut).holders == pipes.holders_of(model, 2)
