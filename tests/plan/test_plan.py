"""Plans of whole steps: what the printed table says, and that it adds up."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny import batch, bert, compiled, gpt2, trained

import onward
from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, type_of
from onward.graph.types import parse_type
from onward.kernels import Target
from onward.plan import MemoryRegion, Plan, make_plan
from onward.plan.arena import ALIGNMENT, aligned
from onward.rewrite import prune, specialize

Run = Callable[[Graph, dict[str, np.ndarray]], dict[str, np.ndarray]]

MAKERS = {"gpt2": gpt2, "bert": bert}


def step_plan(kind: str, **more: Any) -> Plan:
    model = MAKERS[kind]()
    options = onward.TrainerOptions(max_grad_norm=1.0, **more)
    trainer = onward.Trainer(model, torch.optim.AdamW(model.parameters()), options=options)
    trainer.train_step(batch(3, 10, "right"))
    return trainer.plan


@pytest.fixture(scope="module", params=list(MAKERS))
def plan(request: pytest.FixtureRequest) -> Plan:
    return step_plan(request.param)


def test_print_lists_every_buffer_with_bytes_life_and_purpose(plan: Plan) -> None:
    text = str(plan)
    rows = re.findall(
        r"^  (.{43}) +(\d+) +(\d+)  (\d+)-(\d+|end) +(user|persistent|residual|scratch) +(\S.*)$",
        text, re.MULTILINE,
    )  # fmt: skip
    assert len(rows) == len(plan.buffers) > 100
    end = len(plan.launches)
    listed = sorted(
        (name.strip(), int(n), int(at), int(a), end if b == "end" else int(b), region, purpose)
        for name, n, at, a, b, region, purpose in rows
    )
    expected = sorted(
        (b.name[:43], b.nbytes, b.offset, b.first, min(b.last, end), b.region.value, b.purpose)
        for b in plan.buffers
    )
    assert listed == expected
    assert re.search(rf"^  peak +{plan.peak / 2**20:.2f} MiB", text, re.MULTILINE)
    assert "B<=3, T<=10, R0<=" in text
    assert f"{end} launches" in text


def test_the_parts_add_up(plan: Plan) -> None:
    persistent = [b for b in plan.buffers if b.region is MemoryRegion.PERSISTENT]
    assert plan.sizes[MemoryRegion.PERSISTENT] == sum(aligned(b.nbytes) for b in persistent)
    assert plan.peak == sum(plan.sizes.values()) + plan.workspace
    assert plan.workspace == max(x.workspace for x in plan.launches)
    assert plan.lower_bound <= plan.arena_bytes <= 1.3 * plan.lower_bound


def test_no_two_buffers_alive_together_overlap(plan: Plan) -> None:
    """Every pair, by brute force; and the lower bound by counting at each launch."""
    arena = [b for b in plan.buffers if b.region in (MemoryRegion.RESIDUAL, MemoryRegion.SCRATCH)]
    assert len(arena) > 50
    for i, a in enumerate(arena):
        assert a.offset % ALIGNMENT == 0
        assert a.offset + a.nbytes <= plan.arena_bytes
        for b in arena[i + 1 :]:
            if a.first <= b.last and b.first <= a.last:
                apart = a.offset + a.nbytes <= b.offset or b.offset + b.nbytes <= a.offset
                assert apart, f"{a} and {b}"
    most = max(
        sum(aligned(b.nbytes) for b in arena if b.first <= t <= b.last)
        for t in range(len(plan.launches) + 1)
    )
    assert plan.lower_bound == most


def test_every_byte_read_was_written_before(plan: Plan) -> None:
    """Walks the launches over the arena's bytes: an input must still be what its writer left."""
    writer: dict[int, int] = {}  # 64-byte block of the arena -> buffer that wrote it last
    regions = (MemoryRegion.RESIDUAL, MemoryRegion.SCRATCH)

    def blocks(index: int) -> range:
        b = plan.buffers[index]
        return range(b.offset // ALIGNMENT, (b.offset + aligned(b.nbytes)) // ALIGNMENT)

    for layout in plan.inputs.values():
        if plan.buffers[layout.buffer].region in regions:
            writer.update(dict.fromkeys(blocks(layout.buffer), layout.buffer))
    checked = 0
    for launch in plan.launches:
        for x in launch.inputs:
            if x is None or plan.buffers[x.buffer].region not in regions:
                continue
            assert all(writer.get(k) == x.buffer for k in blocks(x.buffer)), launch.text
            checked += 1
        for y in (*launch.outputs, *launch.scratch):
            if plan.buffers[y.buffer].region in regions:
                writer.update(dict.fromkeys(blocks(y.buffer), y.buffer))
    for layout in plan.outputs.values():
        if plan.buffers[layout.buffer].region in regions:
            assert all(writer[k] == layout.buffer for k in blocks(layout.buffer))
    assert checked > 100


def test_user_tensors_are_never_given_memory(plan: Plan) -> None:
    user = [b for b in plan.buffers if b.region is MemoryRegion.USER]
    assert {b.purpose for b in user} <= {"parameter", "module buffer"}
    parameters = [b for b in user if b.purpose == "parameter"]
    state = [b for b in plan.buffers if b.purpose == "optimizer state"]
    assert len(state) == 2 * len(parameters) > 0
    assert sum(b.nbytes for b in state) == 2 * sum(b.nbytes for b in parameters)


def test_updates_write_in_place_and_after_every_reader(plan: Plan) -> None:
    updates = [(i, x) for i, x in enumerate(plan.launches) if x.op == "AdamUpdate"]
    assert len(updates) == sum(b.purpose == "parameter" for b in plan.buffers)
    for i, update in updates:
        assert [y.buffer for y in update.outputs] == [
            update.inputs[j].buffer  # type: ignore[union-attr]
            for j in (0, 2, 3)
        ]
        parameter = update.outputs[0].buffer
        for later in plan.launches[i + 1 :]:
            assert all(x is None or x.buffer != parameter for x in later.inputs)
    assert not any(x.text.startswith("write back") for x in plan.launches)


def test_residuals_are_what_backward_reads_of_forward(plan: Plan) -> None:
    residual = {b.index for b in plan.buffers if b.region is MemoryRegion.RESIDUAL}
    assert residual
    written = {y.buffer for x in plan.launches if not x.backward for y in x.outputs}
    read = {y.buffer for x in plan.launches if x.backward for y in x.inputs if y is not None}
    arena = {
        b.index for b in plan.buffers if b.region in (MemoryRegion.RESIDUAL, MemoryRegion.SCRATCH)
    }
    staged = {x.buffer for x in plan.inputs.values()}
    assert residual == (written & read & arena) - staged


@pytest.mark.parametrize("kind", MAKERS)
def test_accumulation_plans_differ_by_the_update(kind: str) -> None:
    micro = onward.TrainerOptions(gradient_accumulation_steps=2)
    model = MAKERS[kind]()
    trainer = onward.Trainer(model, torch.optim.AdamW(model.parameters()), options=micro)
    data = batch(3, 10)
    trainer.train_step(data)
    first = trainer.plan
    trainer.train_step(data)
    last = trainer.plan
    assert not any(x.op == "AdamUpdate" for x in first.launches)
    assert sum(x.op == "AdamUpdate" for x in last.launches) == len(list(model.parameters()))
    moments = {b.index for b in first.buffers if b.name.startswith("exp_avg")}
    operands = {x.buffer for y in first.launches for x in (*y.inputs, *y.outputs) if x is not None}
    assert not moments & operands, "the session holds them, a micro-step leaves them alone"


def test_apart_regions_do_not_share_bytes() -> None:
    """`joint=False`: residual and scratch each have an arena, for calls that overlap in time."""
    data = batch(3, 10)
    made = compiled(gpt2(), data)
    graph = made.differentiated(trained(made))
    dims = made.captured.dims(list(data.values()))
    assert dims is not None
    bound = specialize(prune(graph, graph.outputs), dims)
    apart, joint = make_plan(bound, dims, joint=False), make_plan(bound, dims)
    assert apart.sizes[MemoryRegion.RESIDUAL] > 0
    assert joint.sizes[MemoryRegion.RESIDUAL] == 0
    assert joint.arena_bytes <= apart.arena_bytes
    for region in (MemoryRegion.RESIDUAL, MemoryRegion.SCRATCH):
        ends = [b.offset + b.nbytes for b in apart.buffers if b.region is region]
        assert max(ends) <= apart.sizes[region]


@pytest.mark.sample(1)
@pytest.mark.parametrize("joint", [True, False], ids=["one arena", "two arenas"])
@pytest.mark.parametrize("kind", MAKERS)
def test_residuals_and_scratch_do_not_meet(
    kind: str, joint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By brute force over the launches themselves, whatever lifetimes the plan says: of two buffers
    of one region, one is dead before the other is written, or they share no byte. And the step
    that runs so is the same."""
    plans: list[Plan] = []

    def planned(graph: Graph, dims: dict[str, int], target: Target) -> Plan:
        plans.append(make_plan(graph, dims, joint, target))
        return plans[-1]

    def steps() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        torch.manual_seed(3)
        model = MAKERS[kind]()
        options = onward.TrainerOptions(max_grad_norm=1.0, seed=1)
        trainer = onward.Trainer(model, torch.optim.AdamW(model.parameters()), options=options)
        losses = [trainer.train_step(batch(3, 10, "right", seed=s)).loss for s in (1, 2)]
        return losses, [p.detach().clone() for p in model.parameters()]

    expected = steps()
    monkeypatch.setattr(onward.compile, "make_plan", planned)
    found = steps()
    for ours, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert len(plans) >= 1
    assert any(p.sizes[MemoryRegion.RESIDUAL] > 0 for p in plans) is not joint
    for p in plans:
        no_two_live_buffers_meet(p)


def no_two_live_buffers_meet(plan: Plan) -> None:
    end = len(plan.launches)
    first: dict[int, int] = {x.buffer: -1 for x in plan.inputs.values()}
    last: dict[int, int] = {x.buffer: end for x in (*plan.outputs.values(), *plan.inputs.values())}
    for i, launch in enumerate(plan.launches):
        for x in launch.operands:
            first.setdefault(x.buffer, i)
            last[x.buffer] = max(last.get(x.buffer, i), i)
    pools: dict[MemoryRegion, list[tuple[int, int, int, int]]] = {}
    for b in plan.buffers:
        if b.index in first and b.region in (MemoryRegion.RESIDUAL, MemoryRegion.SCRATCH):
            pool = MemoryRegion.SCRATCH if plan.joint else b.region
            assert b.offset + b.nbytes <= plan.sizes[pool]
            life = (first[b.index], last[b.index], b.offset, b.offset + b.nbytes)
            pools.setdefault(pool, []).append(life)
    pairs = 0
    for pool in pools.values():
        for i, (a, b, low, high) in enumerate(pool):
            for c, d, start, stop in pool[i + 1 :]:
                if a <= d and c <= b:
                    pairs += 1
                    assert high <= start or stop <= low
    assert pairs > 0


def test_missing_size_is_named() -> None:
    made = compiled(gpt2(layers=1), batch())
    with pytest.raises(onward.OnwardError, match="no size given for T"):
        specialize(made.forward, {"B": 4})


def test_open_sizes_that_binding_itself_asks_for_are_known() -> None:
    """Two reshapes in a row become one, whose shape is made of sizes."""
    graph = Graph()
    b = Builder(graph)
    x = graph.input("x", parse_type("f32[B,T,4]"), Role.BATCH)
    rows, tokens, width = type_of(x).shape
    flat = b.Tanh(b.reshape(x, (rows * tokens, width)))
    apart = b.Unsqueeze(b.reshape(flat, (rows, tokens, width)), b.ints([1]))  # f32[B,1,T,4]
    graph.outputs = {"y": b.Exp(b.transpose(apart, [0, 2, 1, 3]))}
    plan = make_plan(specialize(graph, {"B": 3, "T": 5}, ["B", "T"]), {"B": 3, "T": 5})
    assert plan.launches[-1].op == "Exp"


def test_two_outputs_of_a_launch_share_no_memory(execute: Run) -> None:
    """Both may lie in the input's memory, and one of them is read by nothing."""
    graph = Graph()
    b = Builder(graph)
    x = graph.input("x", parse_type("f32[6,4]"), Role.BATCH)
    scale = graph.input("scale", parse_type("f32[4]"), Role.BATCH)
    e = b.Exp(x)
    _, _, _, total = b.AddLayerNormalization(e, e, scale, None)
    graph.outputs = {"total": b.Tanh(total)}
    plan = make_plan(specialize(graph, {}), {})
    node = next(launch for launch in plan.launches if launch.op == "AddLayerNormalization")
    buffers = [y.buffer for y in node.outputs]
    assert len(set(buffers)) == 4, plan
    rows = np.linspace(-1, 1, 24, dtype=np.float32).reshape(6, 4)
    feeds = {"x": rows, "scale": np.ones(4, np.float32)}
    np.testing.assert_allclose(execute(graph, feeds)["total"], np.tanh(2 * np.exp(rows)), rtol=1e-6)


def test_an_update_overwrites_its_parameter_after_every_other_reader() -> None:
    """A gradient may be there before the backward product that still reads the parameter; an
    update that ran then would have to write elsewhere, and be copied."""
    graph = Graph()
    w = graph.input("w", parse_type("f32[8,8]"), Role.PARAM)
    x = graph.input("x", parse_type("f32[4,8]"), Role.BATCH)
    b = Builder(graph, backward=True)
    updated = b.Sub(w, b.Gemm(x, x, transA=1))
    graph.outputs["next.w"], graph.state["next.w"] = updated, w
    graph.outputs["y"] = b.Gemm(b.Exp(x), w)
    plan = make_plan(specialize(graph, {}), {})
    assert [launch.op for launch in plan.launches][-1] == "Sub"
    written = plan.launches[-1].outputs[0].buffer
    assert plan.buffers[written].region is MemoryRegion.USER
