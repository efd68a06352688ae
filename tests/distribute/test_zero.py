"""ZeRO: ranks that update a part of each parameter make the update of one rank; by the lockstep
evaluator, dropout on, whatever the shares, the optimizer and the form of its state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from shared_steps import (
    Arrays,
    close,
    compare_parts,
    made,
    part_of,
    recipe_of,
    run,
    shards_of,
    step_of,
)

from onward.compile import Compiler
from onward.differentiate import Recipe, UpdateGroup
from onward.distribute import Mesh, collectives, lockstep, ranks_of
from onward.errors import OnwardError
from onward.extend import OPTIMIZERS
from onward.graph.graph import Graph, type_of
from onward.graph.ops.collective import STARTS
from onward.graph.types import parse_type
from onward.kernels import host
from onward.plan import make_plan, sequence_hash
from onward.rewrite import prune, specialize
from onward.shards import LEAST, Shard, shard_of

pytestmark = pytest.mark.usefixtures("captures_kept")

ELEMENTWISE = sorted(name for name, record in OPTIMIZERS.items() if record.elementwise)


@pytest.mark.parametrize(
    ("axes", "sizes", "shares"),
    [
        (("dp_shard",), (2,), (3, 1)),
        (("dp_shard",), (3,), (1, 2, 1)),
        (("dp_replicate", "dp_shard"), (2, 2), (1, 1, 1, 1)),
        (("dp_shard",), (8,), (2, 1, 1, 1, 1, 1, 1, 1)),
        (("dp_replicate", "dp_shard"), (2, 3), (1, 1, 2, 1, 1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_parts_make_the_update_of_the_whole(
    kind: str, axes: tuple[str, ...], sizes: tuple[int, ...], shares: tuple[int, ...]
) -> None:
    """Numbers of elements that ranks divide, and such that they do not; clipping by the norm."""
    more: dict[str, Any] = {"optimizer": "AdamW", "stage": 1}
    [want] = run(kind, [Mesh()], [[sum(shares)]], **more)
    meshes = ranks_of(axes, sizes)
    assert len(shards_of(kind, meshes[0])) > 10
    compare_parts(kind, meshes, run(kind, meshes, [shares], **more), want, **more)


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_optimizer(name: str) -> None:
    more: dict[str, Any] = {"optimizer": name, "stage": 1}
    meshes = ranks_of(("dp_shard",), (2,))
    [want] = run("gpt2", [Mesh()], [[4]], **more)
    compare_parts("gpt2", meshes, run("gpt2", meshes, [(3, 1)], **more), want, **more)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(
    ("axes", "sizes", "shares"),
    [
        (("dp_shard",), (2,), [(3, 1)]),
        (("dp_shard",), (3,), [(1, 2, 1)]),
        (("dp_replicate", "dp_shard"), (2, 2), [(1, 2, 1, 1), (2, 1, 1, 1)]),
    ],
    ids=str,
)
def test_owners_make_updates_of_whole_parameters(
    stage: int, axes: tuple[str, ...], sizes: tuple[int, ...], shares: list[tuple[int, ...]]
) -> None:
    """An optimizer that reads a whole parameter: its owner alone has its state, and all ranks get
    the same weights; whether parts are equal or not, and over a window."""
    more: dict[str, Any] = {"optimizer": "LAMB", "stage": stage}
    [want] = run("gpt2", [Mesh()], [[sum(rows)] for rows in shares], **more)
    meshes = ranks_of(axes, sizes)
    shards = shards_of("gpt2", meshes[-1])
    assert {bool(shard.padding) for shard in shards.values()} >= {False}
    found, window = run("gpt2", meshes, shares, **more), len(shares) > 1
    compare_parts("gpt2", meshes, found, want, **more, accumulate=window)
    hashes = [
        sequence_hash(make_plan(specialize(step, dims, (), outputs), dims))
        for mesh in meshes
        for step in [step_of("gpt2", mesh, accumulate=window, **more)]
        for dims in [{name: 2 if name == "B" else 6 for name in step.symbols}]
        for outputs in [step.signature.requested((), True)]
    ]
    assert len(set(hashes)) == 1, "ranks exchange the same in one order"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rank_that_owns_nothing_writes_what_it_is_sent(stage: int) -> None:
    """Nothing of it reads the parameter in stages 1 and 2; and all that belongs to the update is
    left out with it where a gradient is not finite, on each rank alike."""
    record = OPTIMIZERS["LAMB"]
    attributes = record.attributes({**vars(record.description())})
    groups = (UpdateGroup(0, ("param.w",), record, attributes, record.slots),)
    for mesh in ranks_of(("dp_shard",), (2,)):
        shard = Shard("dp_shard", 2, mesh.rank, 8, owner=1)
        summed = ("param.w",) if stage > 1 else ()
        held = {"param.w": replace(shard, owner=None)} if stage == 3 else {}
        recipe = Recipe(
            groups, None, True, True, average="labels", shards={"param.w": shard},
            summed_parts=summed, held=held,
        )  # fmt: skip
        compiler = Compiler(host(), mesh=mesh)
        graph = compiler.update({"param.w": parse_type("f32[2,4]")}, recipe)
        assert len(graph.signature.slots) == (2 if shard.is_owner else 0)
        plan = compiler.plan(graph, graph.signature.requested((), True), {})
        own = plan.inputs["param.w"].buffer
        assert any(y.buffer == own for launch in plan.launches for y in launch.outputs)
        shared = [
            i for i, launch in enumerate(plan.launches)
            if launch.op in STARTS and launch.attrs.get("update")
        ]  # fmt: skip
        assert len(shared) == 2 and min(shared) >= plan.commit


@pytest.mark.parametrize("name", ["LAMB", "Muon"])
def test_parts_of_other_optimizers_are_refused(name: str) -> None:
    mesh = ranks_of(("dp_shard",), (2,))[0]
    assert name not in ELEMENTWISE
    recipe = recipe_of("gpt2", mesh, optimizer=name, stage=1)
    parts = {n: replace(shard, owner=None) for n, shard in recipe.shards.items()}
    with pytest.raises(OnwardError, match=r"reads all of it, .* fix: zero=0"):
        Compiler(host(), mesh=mesh).step(made("gpt2").forward, replace(recipe, shards=parts))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("clipping", [{}, {"max_grad_norm": None, "max_grad_value": 1e-3}], ids=str)
def test_a_window_of_micro_batches(stage: int, clipping: dict[str, Any]) -> None:
    """Stage 1 exchanges gradients in the last micro-batch, stage 2 in each, and sums parts."""
    more: dict[str, Any] = {"optimizer": "AdamW", "stage": stage, **clipping}
    shares, meshes = [(1, 2, 1, 1), (2, 1, 1, 1)], ranks_of(("dp_replicate", "dp_shard"), (2, 2))
    [want] = run("gpt2", [Mesh()], [[sum(sizes)] for sizes in shares], **more)
    compare_parts(
        "gpt2", meshes, run("gpt2", meshes, shares, **more), want, **more, accumulate=True
    )
    graph = step_of("gpt2", meshes[0], accumulate=True, **more)
    shards = shards_of("gpt2", meshes[0])
    for parameter, held in graph.signature.accumulators.items():
        shard = shards.get(parameter) if stage == 2 else None
        whole = made("gpt2").captured.parameters[parameter].numel()
        assert type_of(graph.find_input(held)).numel == (whole if shard is None else shard.size)
    cut = prune(graph, graph.signature.requested((), False))
    scattered = [node for node in cut if node.op_type == "ReduceScatterStart"]
    assert len(scattered) == (len(shards) if stage == 2 else 0)


@pytest.mark.parametrize("form", ["bf16", "8bit"])
def test_low_state_is_rounded_as_on_one_rank(form: str) -> None:
    """Blocks of codes are whole in each part, and random bits follow from an element's number. A
    gradient in another last bit may round to the neighbour, of which there are few."""
    more: dict[str, Any] = {"optimizer": "AdamW", "form": form, "stage": 1}
    meshes = ranks_of(("dp_shard",), (2,))
    [want] = run("wide", [Mesh()], [[4]], **more)
    for mesh, outputs in zip(meshes, run("wide", meshes, [(3, 1)], **more), strict=True):
        recipe, graph = recipe_of("wide", mesh, **more), step_of("wide", mesh, **more)
        assert len(recipe.shards) > 4
        for slot, name in graph.signature.slots.items():
            if slot.parameter in recipe.shards:
                part = part_of(want[f"next.{name}"], recipe.shards[slot.parameter])
                y = outputs[f"next.{name}"]
                assert y.shape == part.shape and y.dtype == part.dtype
                if y.dtype == np.float32:  # the scales of blocks of codes, a few numbers
                    np.testing.assert_allclose(y, part, rtol=1e-6, err_msg=name)
                    continue
                assert np.mean(y != part) < 0.02, f"{name}: {np.mean(y != part):.3f} differ"
        for name in recipe.shards:
            close(outputs[f"next.{name}"], want[f"next.{name}"], name)


@pytest.mark.parametrize("norm", [None, 0.5])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("at", [None, 0, 6])
def test_all_ranks_find_a_number_that_is_not_finite(
    at: int | None, stage: int, norm: float | None
) -> None:
    """The update of a window that ends early; one number of the summed gradient is infinite, so
    that it is in one rank's part alone."""
    group = torch.optim.SGD([torch.ones(1)], lr=0.5).param_groups[0]
    record = OPTIMIZERS["SGD"]
    groups = (UpdateGroup(0, ("param.w",), record, record.attributes(group)),)
    meshes = ranks_of(("dp_shard",), (2,))
    graphs: list[Graph] = []
    feeds: list[Arrays] = []
    sums = [np.arange(8, dtype=np.float32), np.full(8, 2, np.float32)]
    total = sums[0] + sums[1]
    if at is not None:
        total[at] = sums[0][at] = np.inf
    for mesh in meshes:
        shard = Shard("dp_shard", 2, mesh.rank, 8)
        recipe = Recipe(
            groups, norm, True, True, average="labels", shards={"param.w": shard},
            summed_parts=("param.w",) if stage == 2 else (),
        )  # fmt: skip
        graph = Compiler(host(), mesh=mesh).update({"param.w": parse_type("f32[8]")}, recipe)
        own = sums[mesh.rank] if stage == 1 else part_of(total, shard)
        signature = graph.signature
        given = {"param.w": np.ones(8, np.float32), signature.accumulators["param.w"]: own}
        given |= {n: np.array(h.name == "lr") * 0.5 for h, n in signature.hyperparameters.items()}
        given |= {n: np.array(1) for n in signature.clocks.values()}
        given |= {signature.window_scale or "": np.array(1.0)}
        graphs.append(prune(graph, signature.requested((), True)))
        feeds.append({v.name or "": given[v.name or ""] for v in graphs[-1].inputs})
    for outputs in lockstep(meshes, graphs, feeds):
        assert bool(outputs["finite"]) == (at is None)
        size = float(np.linalg.norm(total))
        if at is None:
            scale = 1.0 if norm is None else min(1.0, norm / (size + 1e-6))
            want = 1 - 0.5 * total * scale
            np.testing.assert_allclose(outputs["next.param.w"], want, rtol=1e-6)
        if norm is not None:
            assert outputs["grad_norm"] == np.float32(size)


def test_bytes_of_the_exchanges() -> None:
    """A rank sends each gradient once and each part of a parameter once (arXiv 1910.02054, 7.2.1);
    and each is numbered as it becomes final, behind the labels."""
    mesh = ranks_of(("dp_shard",), (2,))[1]
    graph = step_of("gpt2", mesh, optimizer="AdamW", stage=1)
    starts = [node for node in graph if node.op_type in STARTS]
    nbytes: dict[str, int] = {}
    for node in starts:
        sent = sum(type_of(x).nbytes for x in node.inputs[:1] if x is not None)
        nbytes[node.op_type] = nbytes.get(node.op_type, 0) + sent
    shards = shards_of("gpt2", mesh).values()
    assert nbytes["ReduceScatterStart"] == sum(s.length * s.ranks * 4 for s in shards)
    assert nbytes["AllGatherStart"] == sum(s.length * 4 for s in shards)


def test_parameters_are_gathered_in_their_own_memory() -> None:
    """No launch copies a parameter whose parts are equal; the peak holds no second copy of all."""
    mesh = ranks_of(("dp_shard",), (2,))[0]
    graph = step_of("gpt2", mesh, optimizer="AdamW", stage=1)
    outputs = graph.signature.requested((), True)
    dims = {name: 2 if name == "B" else 6 for name in graph.symbols}
    plan = make_plan(specialize(graph, dims, (), outputs), dims)
    shards = shards_of("gpt2", mesh)
    back = [launch.text for launch in plan.launches if launch.text.startswith("write back")]
    assert back == [f"write back next.{name}" for name, s in shards.items() if s.padding]
    assert any(not s.padding for s in shards.values())
    order = [launch.op for launch in plan.launches]
    assert plan.commit > max(i for i, op in enumerate(order) if op == "ReduceScatterStart")
    assert plan.commit <= min(i for i, op in enumerate(order) if op.startswith("AdamUpdate"))
    # parts are sent while others are still updated
    assert order.index("AllGatherStart") < len(order) - order[::-1].index("AdamUpdate") - 1


def test_few_exchanges_are_under_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole gradients are let go of before the last of them is final, and parts of parameters
    before the last is updated; the numbers are the same."""
    more: dict[str, Any] = {"optimizer": "AdamW", "stage": 1}
    meshes = ranks_of(("dp_replicate", "dp_shard"), (2, 2))
    want = run("gpt2", meshes, [(1, 1, 1, 1)], **more)
    monkeypatch.setattr(collectives, "IN_FLIGHT", 2000)
    found = run("gpt2", meshes, [(1, 1, 1, 1)], **more)
    for outputs, same in zip(found, want, strict=True):
        for name, y in outputs.items():
            np.testing.assert_array_equal(y, same[name], err_msg=name)
    ops = [node.op_type for node in step_of("gpt2", meshes[0], **more)]
    for start in ("ReduceScatterStart", "AllGatherStart"):
        first, last = ops.index(start), len(ops) - 1 - ops[::-1].index(start)
        assert "CollectiveWait" in ops[first:last]


@pytest.mark.parametrize("block", [1, 256, 1024])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8, 16])
def test_parts_of_a_parameter(block: int, ranks: int) -> None:
    """Parts follow one another, none is empty, and each begins with a block."""
    sizes = (1, LEAST, LEAST * ranks, LEAST * ranks + 1, 38_597_376, 40_000_003, 30522 * 768)
    for elements in sizes:
        found = [shard_of(elements, "dp_shard", ranks, at, block) for at in range(ranks)]
        if ranks == 1 or elements < LEAST * ranks:
            assert found == [None] * ranks
            continue
        parts = [s for s in found if s is not None]
        if not parts:
            assert Shard("dp_shard", ranks, 0, elements, block).length * (ranks - 1) >= elements
            continue
        assert [s.start for s in parts[1:]] == [s.stop for s in parts[:-1]]
        assert parts[0].start == 0 and parts[-1].stop == elements
        assert all(s.size > 0 and s.start % block == 0 for s in parts)
        blocks = [s.within(-(-elements // block)) for s in parts]
        assert [a for a, _ in blocks[1:]] == [b for _, b in blocks[:-1]]
