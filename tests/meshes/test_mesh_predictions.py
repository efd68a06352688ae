"""What is predicted of a step on a mesh, against formulae of ZeRO and Megatron-LM in numpy: bytes
of a rank by kind, bytes that are exchanged, and seconds on links that are described."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import pytest
import tiny
import torch

import onward
from onward.errors import OnwardError
from onward.meshes import MeshChoice
from onward.meshes.prediction import StepPrediction
from onward.simulate.cluster import Cluster, Device, Efficiency, Link

pytestmark = pytest.mark.usefixtures("captures_kept")

ROWS, LENGTH, WIDTH = 4, 6, 64
LATENCY = 1e-5
# one GB/s on all links, whole; four ranks in a node
CLUSTER = Cluster(
    "test", Device(1e11, 1e10, 2**33, 1e11, fp32=1e11), Link(1e9, LATENCY), Link(1e9, LATENCY), 4,
    efficiency=Efficiency(1.0, 1.0, 1.0, 1.0),
)  # fmt: skip


def trainer_of(optimizer: Any = None, heads: int = 4, **options: Any) -> onward.Trainer:
    model = tiny.gpt2(0.1, layers=2, width=WIDTH, n_head=heads, vocab_size=128)
    return onward.Trainer(model, optimizer or onward.optim.AdamW(lr=1e-3), options=options)


@functools.cache
def chosen(mesh: str, zero: int = 0, **options: Any) -> MeshChoice:
    more = {"zero": zero, "mesh": "auto"} if zero else {}
    trainer = trainer_of(**options, **more)
    return trainer.explain_mesh(tiny.batch(ROWS, LENGTH), mesh=mesh, cluster=CLUSTER)


def predicted(mesh: str, zero: int = 0, **options: Any) -> StepPrediction:
    return chosen(mesh, zero, **options).chosen


@functools.cache
def numels() -> tuple[int, ...]:
    return tuple(p.numel() for p in trainer_of().model.parameters())


def part(numel: int, ranks: int) -> int:
    """The elements of rank 0, of a parameter that ranks cut where each has 2,048 or more."""
    return numel if numel < 2048 * ranks else -(-numel // ranks)


MESHES = [
    ("dp_replicate=2", 0), ("dp_replicate=4", 0), ("dp_shard=2", 1), ("dp_shard=4", 1),
    ("dp_shard=3", 3), ("dp_replicate=2,dp_shard=2", 1), ("dp_replicate=2,dp_shard=4", 3),
]  # fmt: skip


@pytest.mark.parametrize(("mesh", "zero"), MESHES, ids=str)
def test_bytes_of_a_rank_follow_zero(mesh: str, zero: int) -> None:
    """Weights of 4 bytes and moments of 8, whole or a part by the stage; a page more for buffers
    and for what is aligned."""
    one = predicted(mesh, zero)
    ranks = one.candidate.size("dp_shard") if zero else 1
    buffers = sum(b.numel() * b.itemsize for b in trainer_of().model.buffers())
    weights = sum(4 * (part(n, ranks) if zero == 3 else n) for n in numels())
    moments = sum(8 * part(n, ranks) for n in numels())
    assert one.memory["weights"] == weights + buffers
    assert moments <= one.memory["moments"] <= moments + 128 * len(numels())
    assert (one.memory["gathered"] > 0) == (zero == 3)


@pytest.mark.parametrize(("mesh", "zero"), MESHES, ids=str)
def test_exchanges_follow_zero(mesh: str, zero: int) -> None:
    """Each gradient is summed once along each axis; parts are gathered once by stages 1 and 2, for
    forward and backward by stage 3. Labels, loss, norms and flags are a few numbers."""
    one = predicted(mesh, zero)
    ranks = one.candidate.size("dp_shard") if zero else 1
    found: dict[tuple[str, str], int] = {(x.op, x.axis): x.nbytes for x in one.exchanges}
    cut = sum(4 * ranks * part(n, ranks) for n in numels() if part(n, ranks) < n)
    whole = sum(4 * n for n in numels() if part(n, ranks) == n)
    few = 256 + 16 * len(numels())
    replicas = found.get(("AllReduce", "dp_replicate"), 0)
    if one.candidate.size("dp_replicate") > 1:
        assert whole + cut / ranks <= replicas <= whole + cut / ranks + few
    if zero:
        assert found["ReduceScatter", "dp_shard"] == cut
        assert whole <= found["AllReduce", "dp_shard"] <= whole + few
        gathers = found["AllGather", "dp_shard"]
        assert gathers == cut if zero < 3 else cut <= gathers <= 2 * cut
    n = one.candidate.size("dp_shard")
    sent = 3 * (n - 1) / n * cut if zero == 1 else None
    if sent is not None:  # a ring's share, without what is not cut
        small = 2 * (n - 1) / n * found["AllReduce", "dp_shard"]
        want = 2 * (n - 1) / n * cut + small
        assert one.sent()["dp_shard"] == pytest.approx(want, abs=len(numels()))


@pytest.mark.parametrize(("mesh", "zero"), [("dp_replicate=2", 0), ("dp_shard=3", 1)], ids=str)
def test_copies_of_what_gloo_exchanges_follow_its_calls(mesh: str, zero: int) -> None:
    """Small tensors are summed as one copy, and a scattered sum is one of the whole tensor; three
    ranks gather into a copy. All of it is less than a bucket, so that a kind is one exchange."""
    more = {"zero": zero, "mesh": "auto"} if zero else {}
    trainer, batch = trainer_of(**more), tiny.batch(ROWS, LENGTH)
    gloo = replace(CLUSTER, scatters=False)
    one = trainer.explain_mesh(batch, mesh=mesh, cluster=gloo).chosen
    ranks = one.candidate.size("dp_shard") if zero else 1
    cut = sum(4 * ranks * part(n, ranks) for n in numels() if part(n, ranks) < n)
    whole = sum(4 * n for n in numels() if part(n, ranks) == n)
    few = 256 + 16 * len(numels())
    if zero:
        assert max(cut, whole) <= one.memory["exchanged"] <= cut + whole + few
    else:
        assert whole <= one.memory["exchanged"] <= whole + few
    assert predicted(mesh, zero).memory["exchanged"] == 0, "NCCL makes none"
    assert one.nbytes == sum(one.memory.values())


@functools.cache
def wide(mesh: str, **options: Any) -> StepPrediction:
    """A batch that is worth cutting weights for."""
    torch.manual_seed(0)
    model = tiny.gpt2(0.1, layers=2, width=256, n_head=4, vocab_size=128)
    options |= {"mesh": "auto"} if options else {}
    trainer = onward.Trainer(model, onward.optim.AdamW(lr=1e-3), options=options)
    return trainer.explain_mesh(tiny.batch(16, 32), mesh=mesh, cluster=CLUSTER).chosen


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_along_tp_hold_parts_and_send_sums(ranks: int) -> None:
    """At most two sums of hidden states a layer in each direction, beside few others."""
    one, whole = wide(f"tp={ranks}"), wide("dp_replicate=2")
    held, all_of_it = one.memory["weights"], whole.memory["weights"]
    assert all_of_it / ranks < held < 1.2 * all_of_it / ranks + 4 * 256 * 64
    assert one.memory["moments"] == pytest.approx(2 * held, rel=0.05)
    [sums] = [x for x in one.exchanges if x.op == "AllReduce"]
    assert one.rows == 16 * ranks, "as many samples as the ranks would have apart"
    hidden = 4 * one.rows * 32 * 256
    assert 2 * 2 * hidden <= sums.nbytes <= 2 * 2 * 2 * hidden + 3 * hidden
    assert 4 <= sums.count <= 4 * 2 + 6


@pytest.mark.parametrize("stage", [1, 3])
def test_state_beside_tp_is_parts_of_parts(stage: int) -> None:
    """Each rank along dp_shard has half of what ranks along tp have, but for what is too small."""
    one, tensor = wide("dp_shard=2,tp=2", zero=stage), wide("tp=2")
    assert one.memory["moments"] == pytest.approx(tensor.memory["moments"] / 2, rel=0.03)
    share = 2 if stage == 3 else 1
    assert one.memory["weights"] == pytest.approx(tensor.memory["weights"] / share, rel=0.03)
    found = {(x.op, x.axis): x.nbytes for x in one.exchanges}
    scattered = found["ReduceScatter", "dp_shard"]
    assert scattered == pytest.approx(tensor.memory["weights"], rel=0.03), "the gradients of parts"


def test_positions_between_weights_take_less_for_more_passes() -> None:
    """At most an N-th of the activations where they are shared; ten passes where eight were."""
    one, whole = wide("tp=2", sequence_parallel=True), wide("tp=2")
    assert str(one.candidate) == "tp=2, sequence_parallel" and str(whole.candidate) == "tp=2"
    assert 0.5 * whole.memory["activations"] < one.memory["activations"]
    assert one.memory["activations"] < 0.85 * whole.memory["activations"]
    assert {"AllGather", "ReduceScatter"} <= {x.op for x in one.exchanges}
    assert 1.0 < one.sent()["tp"] / whole.sent()["tp"] < 1.5


def test_ranks_along_cp_send_keys_and_gradients() -> None:
    """Gradients of all weights are summed, and keys and values of each layer gathered."""
    one, whole = wide("cp=2"), wide("dp_replicate=2")
    assert one.memory["weights"] == whole.memory["weights"] and one.rows == 2 * whole.rows
    found = {x.op: x.nbytes for x in one.exchanges}
    assert found["AllReduce"] == pytest.approx(whole.memory["weights"], rel=0.05)
    keys = 2 * 2 * 4 * one.rows * 32 * 256  # of two layers, once
    assert keys <= sum(n for op, n in found.items() if op != "AllReduce") <= 4 * keys


@functools.cache
def staged(mesh: str, schedule: str = "1F1B", micro: int | None = None) -> StepPrediction:
    """Eight layers of which nothing else is worth mentioning, on links that cost nothing."""
    torch.manual_seed(0)
    model = tiny.gpt2(0.1, layers=8, width=128, n_head=4, vocab_size=16)
    given = {"pipeline_schedule": schedule, "pipeline_microbatches": micro}
    trainer = onward.Trainer(model, onward.optim.AdamW(lr=1e-3), options=given)
    fast = Link(1e30, 1e-30)
    cluster = replace(CLUSTER, in_node=fast, across=fast)
    return trainer.explain_mesh(tiny.batch(8, 16), mesh=mesh, cluster=cluster).chosen


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_along_pp_hold_layers_and_send_hidden_states(ranks: int) -> None:
    """Each boundary passes the hidden state of every sample, and its gradient back."""
    one, whole = staged(f"pp={ranks}"), staged("dp_replicate=2")
    assert one.rows == 8 * ranks, "as many samples as the ranks would have apart"
    for kind in ("weights", "moments"):
        share = one.memory[kind] / whole.memory[kind]
        assert 1 / ranks <= share < 1.25 / ranks, kind
    hidden = 4 * one.rows * 16 * 128
    sent = {x.op: x for x in one.exchanges}["Send"]
    assert sent.count % ranks == 0, "micro-batches of one row or more"
    ways = 1 if ranks == 2 else 2  # the first and the last rank send one way alone
    assert hidden <= sent.nbytes <= ways * 2 * hidden


def shares_idle(ranks: int, schedule: str, micro: int | None = None) -> float:
    """The time that the busiest rank waits for others, as a share of its own."""
    one = staged(f"pp={ranks}", schedule, micro)
    return one.exposed / one.computing


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["GPipe", "1F1B"])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_a_pipeline_idles_as_its_schedule_says(ranks: int, schedule: str, rounds: int) -> None:
    """P - 1 micro-batches of M pass until the last rank has work (GPipe, arXiv 1811.06965)."""
    micro = rounds * ranks
    assert shares_idle(ranks, schedule, micro) == pytest.approx((ranks - 1) / micro, rel=0.25)


@pytest.mark.parametrize("ranks", [2, 4])
def test_interleaved_stages_idle_less(ranks: int) -> None:
    """Two stages a rank halve it; gradients of weights fill what is left (arXiv 2401.10241)."""
    plain, interleaved, filled = (
        shares_idle(ranks, s) for s in ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble")
    )
    assert 0.35 * plain < interleaved < 0.75 * plain
    assert filled < interleaved


def test_micro_batches_in_memory_follow_the_schedule() -> None:
    """GPipe keeps all of them until the backward begins, 1F1B at most one for each rank."""
    kept = {s: staged("pp=2", s, 8).memory["activations"] for s in ("GPipe", "1F1B")}
    assert 0.2 * kept["GPipe"] < kept["1F1B"] < 0.6 * kept["GPipe"]


def test_pipelines_beside_other_axes_send_less_each() -> None:
    alone = staged("pp=2")
    sent = {x.op: x.nbytes for x in alone.exchanges}["Send"]
    for mesh in ("pp=2,tp=2", "pp=2,cp=2"):
        one = staged(mesh)
        [messages] = [x for x in one.exchanges if x.op == "Send"]
        # twice the samples; ranks along cp have half of the positions, along tp whole sums
        assert messages.nbytes == pytest.approx(sent * (2 if "tp" in mesh else 1), rel=0.01)
        assert {x.axis for x in one.exchanges} == {axis for axis, _ in one.candidate.sizes}
    data = staged("dp_shard=2,pp=2")
    assert {x.op: x.nbytes for x in data.exchanges if x.axis == "pp"}["Send"] == sent


def test_counts_of_meshes_of_several_axes_are_near_their_graphs() -> None:
    torch.manual_seed(0)
    model = tiny.gpt2(0.1, layers=2, width=256, n_head=4, vocab_size=128)
    trainer = onward.Trainer(model, onward.optim.AdamW(lr=1e-3))
    found = trainer.explain_mesh(tiny.batch(16, 32), mesh="auto", ranks=4, cluster=CLUSTER)
    table = {str(one.candidate): one for one in found.table if not one.built}
    checked = 0
    for mesh, options in (
        ("dp_shard=2,tp=2", {"zero": 1}), ("dp_shard=2,tp=2", {"zero": 3}),
        ("dp_shard=2,cp=2", {"zero": 1}), ("cp=2,tp=2", {}), ("cp=4", {}),
        ("tp=4", {"sequence_parallel": True}), ("dp_replicate=2,pp=2", {}),
        ("pp=2,cp=2", {}), ("dp_shard=2,pp=2", {"zero": 3}),
    ):  # fmt: skip
        want = wide(mesh, **options)
        counts = table.get(str(want.candidate))
        if counts is not None:
            checked += 1
            assert 0.6 < counts.nbytes / want.nbytes < 1.7, (mesh, options)
            assert 0.3 < counts.seconds / want.seconds < 3, (mesh, options)
    assert len(table) > 12 and checked > 5


def test_an_owner_of_parameters_has_their_state() -> None:
    """LAMB updates whole parameters: the largest are given first to the rank that has least."""
    trainer = trainer_of(onward.optim.LAMB(), zero=1, mesh="auto")
    given = tiny.batch(ROWS, LENGTH)
    one = trainer.explain_mesh(given, mesh="dp_shard=2", cluster=CLUSTER).chosen
    loads, mine, whole = [0, 0], 0, 0
    for n in sorted(numels(), reverse=True):
        owner = loads.index(min(loads))
        loads[owner] += n
        mine += n if owner == 0 and n >= 2 * 2048 else 0
        whole += n if n < 2 * 2048 else 0  # too small to be cut: on all ranks
    assert one.memory["moments"] == pytest.approx(8 * (mine + whole), rel=0.02)
    assert "Broadcast" in {x.op for x in one.exchanges}


def test_a_product_of_axes_has_the_exchanges_of_both() -> None:
    one, tensor = wide("dp_replicate=2,tp=2"), wide("tp=2")
    assert one.rows == tensor.rows == 16 * 2
    sums = {x.axis: x for x in one.exchanges if x.op == "AllReduce"}
    [alone] = [x for x in tensor.exchanges if x.op == "AllReduce"]
    assert sums["tp"].nbytes == pytest.approx(alone.nbytes, rel=0.02)
    assert sums["dp_replicate"].nbytes == pytest.approx(one.memory["weights"], rel=0.05)


def test_a_window_counts_all_of_its_micro_batches() -> None:
    """Stage 1 sums gradients once in a window, stage 2 in each micro-batch, in parts."""
    window = {"gradient_accumulation_steps": 4}
    first, second, alone = (predicted("dp_shard=2", z, **m) for z, m in
                            ((1, window), (2, window), (1, {})))  # fmt: skip
    scattered = [
        next(x for x in one.exchanges if x.op == "ReduceScatter") for one in (first, second, alone)
    ]
    assert scattered[0].nbytes == scattered[2].nbytes
    assert scattered[1].nbytes == 4 * scattered[0].nbytes
    assert 3 < first.computing / alone.computing < 5
    sums = sum(4 * (n - part(n, 2)) for n in numels())
    assert first.memory["gradients"] - second.memory["gradients"] == pytest.approx(sums, rel=0.1)


# ---- seconds


def seconds(mesh: str, zero: int = 0, **changes: Any) -> StepPrediction:
    cluster = replace(CLUSTER, **changes)
    more = {"zero": zero, "mesh": "auto"} if zero else {}
    given = tiny.batch(ROWS, LENGTH)
    return trainer_of(**more).explain_mesh(given, mesh=mesh, cluster=cluster).chosen


def test_links_without_a_cost_leave_the_kernels() -> None:
    fast = Link(1e30, 1e-30)
    one = seconds("dp_replicate=4", in_node=fast, across=fast)
    assert one.seconds == pytest.approx(one.computing, rel=1e-6) and one.exposed < 1e-9


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_slow_link_takes_the_time_of_its_rings(ranks: int) -> None:
    """Where all else is hidden, a step lasts as long as its gradients take: 2 (n - 1) / n of their
    bytes over the rate, and 2 (n - 1) hops a ring."""
    slow = Link(1e6, LATENCY)
    one = seconds(f"dp_replicate={ranks}", in_node=slow)
    nbytes = sum(4 * n for n in numels())
    want = 2 * (ranks - 1) / ranks * nbytes / 1e6
    assert want < one.seconds < 1.02 * want + one.computing
    assert sum(x.seconds for x in one.exchanges) == pytest.approx(want, rel=0.01)


def test_kernels_take_their_products_and_bytes() -> None:
    """A step of 6 FLOPs a weight and token in products, of which embeddings have none."""
    model = trainer_of().model
    tables = sum(p.numel() for n, p in model.named_parameters() if "wpe" in n)
    tokens = ROWS * LENGTH
    flops = 6 * tokens * (sum(numels()) - tables)
    device = Device(flops, 1e30, 2**33, flops, fp32=flops)
    one = seconds("dp_replicate=2", device=device)
    assert one.computing == pytest.approx(1.0, rel=0.1)


def test_a_library_without_scatters_sends_whole_sums() -> None:
    one = seconds("dp_shard=2", 1, scatters=False)
    two = seconds("dp_shard=2", 1)
    taken = [next(x for x in s.exchanges if x.op == "ReduceScatter").seconds for s in (one, two)]
    assert taken[0] == pytest.approx(2 * taken[1], rel=1e-6)
    cut = sum(4 * n for n in numels() if n >= 2 * 2048)
    more = one.sent()["dp_shard"] - two.sent()["dp_shard"]
    assert more == pytest.approx(cut / 2, abs=len(numels()))


# ---- choices


def test_the_choice_among_four_ranks() -> None:
    found = trainer_of().explain_mesh(
        tiny.batch(ROWS, LENGTH), mesh="auto", ranks=4, cluster=CLUSTER
    )
    assert str(found.usual) == "dp_replicate=4"
    named = {str(one.candidate) for one in found.table}
    assert {"tp=4", "dp_replicate=2, tp=2", "dp_shard=4, zero=3"} < named
    assert all(one.rows * one.candidate.batches == 4 * ROWS for one in found.table if one.rows)
    text = str(found)
    assert "exchanges of" in text and found.line() in text and found.line().count("\n") == 0


def test_memory_decides_where_the_usual_mesh_does_not_fit() -> None:
    whole = predicted("dp_replicate=2").nbytes
    small = replace(CLUSTER, device=replace(CLUSTER.device, memory=whole / 0.9 * 0.8))
    found = trainer_of().explain_mesh(tiny.batch(ROWS, LENGTH), ranks=2, cluster=small)
    assert found.chosen.candidate != found.usual and found.chosen.nbytes <= 0.8 * whole
    assert "would need" in found.why


def test_slow_links_and_large_batches_keep_the_usual_mesh() -> None:
    """The counts of a mesh are an estimate of what its graph says, and are replaced by it."""
    for one in ("dp_shard=4, zero=1", "dp_shard=4, zero=3"):
        found = trainer_of().explain_mesh(tiny.batch(ROWS, LENGTH), ranks=4, cluster=CLUSTER)
        held = next(x for x in found.table if str(x.candidate) == one)
        mesh, _, zero = one.partition(", zero=")
        want = predicted(mesh, int(zero or 0))
        assert 0.5 < held.nbytes / want.nbytes < 2
        assert 0.3 < held.seconds / want.seconds < 3


# ---- refusals


@pytest.mark.parametrize(
    ("said", "options", "message"),
    [
        ({"mesh": "dp_replicate=2", "ranks": 3}, {}, r"has 2 ranks, not 3; fix: leave ranks out"),
        ({"mesh": "auto"}, {}, r'mesh="auto" of how many ranks; fix: ranks=4'),
        ({"mesh": "pp=64"}, {}, r"do not make 64 stages of a pipeline; fix: fewer ranks along pp"),
        ({"mesh": "pp=2"}, {"pipeline_microbatches": 9}, r"no 9 micro-batches .*; fix: a row"),
        ({"mesh": "pp=2"}, {"fetch": ("logits",)}, r"fetch and a mesh with pp"),
    ],
    ids=str,
)
def test_a_mesh_that_cannot_be_is_refused(
    said: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    trainer = trainer_of(**options)
    with pytest.raises(OnwardError, match=message):
        trainer.explain_mesh(tiny.batch(ROWS, LENGTH), cluster=CLUSTER, **said)


def test_nothing_of_the_trainer_changes() -> None:
    trainer = trainer_of()
    before = [p.detach().clone() for p in trainer.model.parameters()]
    for mesh in ("dp_replicate=2", "tp=2", "pp=2"):
        trainer.explain_mesh(tiny.batch(ROWS, LENGTH), mesh=mesh, cluster=CLUSTER)
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert trainer.updates == 0 and trainer.options.mesh is None
    found = float(trainer.train_step(tiny.batch(ROWS, LENGTH)).loss)
    assert found == float(trainer_of().train_step(tiny.batch(ROWS, LENGTH)).loss)
    assert math.isfinite(found)
