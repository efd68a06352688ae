"""What each rank of a mesh has for itself in a checkpoint, on the ranks of another mesh: sums of an
open window keep their total, generators and registered objects go with the share of the batch. The
meshes are on paper, and gradients are whole numbers, so that sums are exact."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from bare_optimizers import bare_optimizer

import onward
from onward import shards
from onward.distribute import Mesh, ranks_of
from onward.distribute.tensor import Sharding, TensorCut
from onward.errors import OnwardError
from onward.train.checkpointing import random_part
from onward.train.optim import to_torch
from onward.train.optimizer_state import ParameterState
from onward.train.rank_states import RankStates
from onward.train.torch_optimizer import TorchOptimizer

SHAPES = {"table": (7, 6), "fused": (5, 12), "small": (3,)}


@dataclass(frozen=True)
class Setup:
    """A mesh, the stage of ZeRO, and the cuts along tp by parameter."""

    sizes: dict[str, int] = field(default_factory=dict)
    zero: int = 0
    cuts: dict[str, Sharding] = field(default_factory=dict)

    @property
    def meshes(self) -> list[Mesh]:
        return ranks_of(tuple(self.sizes), tuple(self.sizes.values()))


TABLE, FUSED = {"table": Sharding(0)}, {"table": Sharding(1), "fused": Sharding(1, 3)}
SETUPS = [
    Setup(),
    Setup({"dp_replicate": 3}),
    Setup({"dp_shard": 2}, 1),
    Setup({"dp_shard": 2}, 2),
    Setup({"dp_replicate": 2, "dp_shard": 2}, 3),
    Setup({"tp": 2}, 0, TABLE),
    Setup({"tp": 2}, 0, FUSED),
    Setup({"dp_replicate": 2, "tp": 2}, 0, TABLE),
    Setup({"dp_shard": 2, "tp": 2}, 1, TABLE),
    Setup({"dp_shard": 2, "tp": 2}, 2, FUSED),
    Setup({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 3, TABLE),
    Setup({"cp": 2}),
    Setup({"dp_replicate": 2, "cp": 3}),
    Setup({"cp": 2, "tp": 2}, 0, FUSED),
    Setup({"dp_shard": 2, "cp": 2}, 2),
    Setup({"dp_shard": 2, "cp": 2, "tp": 2}, 3, TABLE),
]


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LEAST", 4)


def cut(held: TorchOptimizer, setup: Setup, mesh: Mesh) -> None:
    at, model = mesh.coordinate("tp"), held.model
    held.cut_tensors(
        {model.get_parameter(n): TensorCut("tp", 2, at, s) for n, s in setup.cuts.items()}
    )


def held_by(setup: Setup, mesh: Mesh) -> TorchOptimizer:
    """The optimizer of one rank."""
    held = bare_optimizer(SHAPES, mesh, setup.zero)
    if mesh.size("tp") > 1:
        cut(held, setup, mesh)
    return held


def places(setup: Setup, mesh: Mesh, name: str) -> tuple[np.ndarray, bool]:
    """The numbers of the elements that this rank sums of a parameter, -1 for padding; and whether
    they are a part along dp_shard."""
    index = np.arange(np.prod(SHAPES[name])).reshape(SHAPES[name])
    cut = setup.cuts.get(name)
    if cut is not None:
        assert cut.dim is not None
        room = [(0, 0)] * index.ndim
        room[cut.dim] = (0, -index.shape[cut.dim] % (2 * cut.pieces))
        wide = np.pad(index, room, constant_values=-1)
        pieces = np.split(wide, 2 * cut.pieces, cut.dim)
        index = np.concatenate(pieces[mesh.coordinate("tp") :: 2], cut.dim)
    ranks = mesh.size("dp_shard")
    if setup.zero < 2 or index.size < 4 * ranks:
        return index, False
    length = -(-index.size // ranks)
    start = length * mesh.coordinate("dp_shard")
    return index.reshape(-1)[start : start + length], True


def gradients(setup: Setup) -> list[dict[str, np.ndarray]]:
    """The terms that ranks have of each gradient, in whole numbers: of each share of the batch,
    and of each part of its positions."""
    draw = np.random.default_rng(3)
    return [
        {n: draw.integers(-99, 99, shape).astype(np.float32) for n, shape in SHAPES.items()}
        for _ in range(terms_of(setup.meshes[0]))
    ]


def terms_of(mesh: Mesh) -> int:
    """The number of ranks that have terms of each gradient."""
    return mesh.batches * mesh.size("cp")


def saved_by(setup: Setup, is_mean: bool = False, adaptive: bool = False) -> dict[str, Any]:
    """A checkpoint within a window."""
    drawn, own = gradients(setup), list[Any]()
    state: dict[str, Any] = {}
    for mesh in setup.meshes:
        sums: dict[str, Any] = {}
        for name in SHAPES:
            index, is_part = places(setup, mesh, name)
            at = mesh.share * mesh.size("cp") + mesh.coordinate("cp")
            # rows are summed over all ranks
            terms = drawn if is_part else drawn[at : at + 1]
            means = mesh.batches if is_mean and is_part else 1
            total = np.append(np.sum([each[name] for each in terms], 0).reshape(-1), 0) / means
            sums[f"accumulator.{name}"] = torch.from_numpy(total[index].astype(np.float32))
        torch.manual_seed(mesh.rank)
        held = {
            **random_part().save(), "registered": [["Draws", {"at": mesh.share}]],
            "optimizer": {**sums, "exp_avg.table": torch.ones(7, 6)}, "micro_steps": 1,
            "window_by_labels": not is_mean, "updates": 4,
        }  # fmt: skip
        state = RankStates(mesh, held_by(setup, mesh), adaptive).of_all(held)
        own += state.get("ranks", [])
    return state | ({"ranks": own} if own else {})


def alike(state: Any) -> Any:
    """The checkpoint, without registered objects."""
    ranks = [{**own, "registered": []} for own in state.get("ranks", [])]
    return {**state, "registered": [], **({"ranks": ranks} if ranks else {})}


def restored(setup: Setup, state: Any, adaptive: bool = False) -> list[Mapping[str, Any]]:
    return [RankStates(m, held_by(setup, m), adaptive).own_of(state) for m in setup.meshes]


def alike_in_rows(a: Mesh, b: Mesh) -> bool:
    """Whether two ranks have the same rows of sums."""
    return all(a.coordinate(axis) == b.coordinate(axis) for axis in ("dp_shard", "tp"))


@pytest.mark.parametrize("is_mean", [False, True])
def test_sums_keep_their_total(is_mean: bool) -> None:
    """From every setup to every other: what the ranks add up to, of each element, is what those
    that saved add up to; of means the mean."""
    for before, after in itertools.product(SETUPS, SETUPS):
        state = alike(saved_by(before, is_mean))
        want = gradients(before)
        found = restored(after, state)
        for name in SHAPES:
            total, terms = np.zeros(np.prod(SHAPES[name]) + 1), 1
            for mesh, own in zip(after.meshes, found, strict=True):
                index, is_part = places(after, mesh, name)
                sums = own["optimizer"][f"accumulator.{name}"].numpy()
                assert sums.shape == index.shape and not sums[index == -1].any()
                is_again = is_part and (mesh.coordinate("dp_replicate") or mesh.coordinate("cp"))
                if is_again:  # replicas and ranks along cp have the same
                    like = [other for other in after.meshes if alike_in_rows(other, mesh)]
                    first = found[like[0].rank]["optimizer"][f"accumulator.{name}"].numpy()
                    np.testing.assert_array_equal(sums, first)
                if (name in after.cuts or not mesh.coordinate("tp")) and not is_again:
                    np.add.at(total, index, sums)
                terms = 1 if is_part else mesh.batches
            expected = np.sum([each[name] for each in want], 0).reshape(-1)
            scale = (terms, before.meshes[0].batches) if is_mean else (1, 1)
            np.testing.assert_allclose(total[:-1] / scale[0], expected / scale[1], rtol=1e-6)
        assert all(set(own["optimizer"]) == {*state["optimizer"], *(
            f"accumulator.{n}" for n in SHAPES)} for own in found)  # fmt: skip


@pytest.mark.parametrize("setup", SETUPS)
def test_the_same_ranks_have_their_own_sums(setup: Setup) -> None:
    state = saved_by(setup)
    for mesh, own in zip(setup.meshes, restored(setup, state), strict=True):
        own_term = mesh.share * mesh.size("cp") + mesh.coordinate("cp")
        drawn = np.append(gradients(setup)[own_term]["small"], 0)
        found = own["optimizer"]["accumulator.small"].numpy()
        np.testing.assert_array_equal(found, drawn[:-1])
        torch.manual_seed(mesh.rank)
        assert torch.equal(own["random"]["torch"], torch.get_rng_state())
        assert own["registered"] == [["Draws", {"at": mesh.share}]]


def test_sums_that_come_before_the_cuts_are_chosen() -> None:
    """A new Trainer along tp has whole sums until its first step cuts them; with zero=2 ranks would
    cut them as rows too, of which those that hold zeros would take their part."""
    state, [want] = alike(saved_by(SETUPS[0])), gradients(SETUPS[0])
    for setup in (each for each in SETUPS if "tp" in each.sizes):
        total = {name: np.zeros(np.prod(shape) + 1) for name, shape in SHAPES.items()}
        for mesh in setup.meshes:
            held = bare_optimizer(SHAPES, mesh, setup.zero)
            states = RankStates(mesh, held)
            if setup.zero > 1:
                with pytest.raises(OnwardError, match="has still to choose its cuts along tp"):
                    states.own_of(state)
                continue
            own, parameters = states.own_of(state), dict(held.model.named_parameters())
            for name, p in parameters.items():
                sums = own["optimizer"][f"accumulator.{name}"]
                held.updates.total(p).copy_(sums)
            cut(held, setup, mesh)
            for name, p in parameters.items():
                index, _ = places(setup, mesh, name)
                sums = held.updates.total(p).numpy()
                assert sums.shape == index.shape
                if name in setup.cuts or not mesh.coordinate("tp"):
                    np.add.at(total[name], index, sums)
        for name, found in total.items():
            if setup.zero < 2:
                np.testing.assert_array_equal(found[:-1], want[name].reshape(-1))


@pytest.mark.parametrize("setup", [each for each in SETUPS if "tp" in each.sizes])
def test_moments_that_come_before_the_cuts_are_chosen(setup: Setup) -> None:
    for mesh in setup.meshes:
        held = bare_optimizer(SHAPES, mesh, setup.zero)
        parameters = dict(held.model.named_parameters())
        whole = {n: torch.arange(1.0, 1 + p.numel()).view(p.shape) for n, p in parameters.items()}
        slots = {n: {"exp_avg": x, "exp_avg_sq": 2 * x} for n, x in whole.items()}
        held.updates.adopt({p: ParameterState(5, slots[n]) for n, p in parameters.items()})
        cut(held, setup, mesh)
        rows = replace(setup, zero=2 * bool(setup.zero))  # stage 1 cuts moments, and no sums
        for name, p in parameters.items():
            index, _ = places(rows, mesh, name)
            expected = np.append(whole[name].numpy().reshape(-1), 0)[index]
            np.testing.assert_array_equal(held.updates.state.tensors[p]["exp_avg"], expected)
            assert held.updates.state.counts[p] == 5


def test_a_state_of_one_process_is_shared_out() -> None:
    """`load_state_dict` on several ranks: a sum counts once."""
    [state] = restored(SETUPS[0], saved_by(SETUPS[0]))
    for setup in SETUPS[1:]:
        own = [RankStates(m, held_by(setup, m)).shared_out(state) for m in setup.meshes]
        sums = [s["optimizer"]["accumulator.small"] for s in own]
        tp = setup.sizes.get("tp", 1)
        assert torch.equal(
            torch.stack(sums[::tp]).sum(0), torch.from_numpy(gradients(SETUPS[0])[0]["small"])
        )
        between = {**state, "micro_steps": 0}
        mesh = setup.meshes[0]
        assert RankStates(mesh, held_by(setup, mesh)).shared_out(between) is between


def between_updates(setup: Setup, registered: list[Any]) -> dict[str, Any]:
    state = saved_by(setup)
    ranks = [{**own, "registered": registered, "sums": {}, "sum_parts": {}}
             for own in state["ranks"]]  # fmt: skip
    optimizer = {"exp_avg.table": torch.ones(7, 6)}
    return {**state, "ranks": ranks, "micro_steps": 0, "optimizer": optimizer}


def test_generators_go_with_the_share(caplog: pytest.LogCaptureFixture) -> None:
    """Ranks along tp have one share; shares that nobody had draw numbers of their own, the same in
    every resumed run."""
    state = between_updates(SETUPS[1], [["Clock", {"at": 5, "table": torch.ones(2)}]])
    setup = Setup({"dp_replicate": 5, "tp": 2})
    with caplog.at_level(logging.WARNING, "onward"):
        found, again = restored(setup, state), restored(setup, state)
    assert caplog.text.count("random generators for 3 shares of a batch; those of the other 2") == 2
    drawn: list[bytes] = []
    for mesh, own, other in zip(setup.meshes, found, again, strict=True):
        torch.manual_seed(mesh.share)
        is_known = torch.equal(own["random"]["torch"], torch.get_rng_state())
        assert is_known == (mesh.share < 3)
        assert torch.equal(own["random"]["torch"], other["random"]["torch"])
        random_part().restore(own)
        drawn.append(torch.rand(4).numpy().tobytes() + np.random.rand(4).tobytes())
        assert own["registered"][0][1]["at"] == 5
    assert drawn[::2] == drawn[1::2] and len(set(drawn)) == 5
    caplog.clear()
    restored(Setup({"dp_shard": 2}, 1), state)
    assert not caplog.records


def test_what_other_ranks_cannot_go_on_from() -> None:
    own = [["Draws", {"at": 1}]]
    state = between_updates(SETUPS[1], own)
    state["ranks"][2]["registered"] = [["Draws", {"at": 2}]]
    with pytest.raises(OnwardError, match="Draws have a state of their own for each of 3 shares"):
        restored(SETUPS[0], state)
    restored(Setup({"dp_shard": 3}, 1), state)  # as many shares
    adaptive = alike(saved_by(SETUPS[1], adaptive=True))
    with pytest.raises(OnwardError, match="on dp_replicate 3, and dp_replicate 2 goes on here"):
        restored(Setup({"dp_replicate": 2}), adaptive, True)
    restored(SETUPS[1], adaptive, adaptive=True)
    plain = alike(saved_by(SETUPS[1]))
    with pytest.raises(OnwardError, match="adasum combines the gradients of replicas"):
        restored(SETUPS[1], plain, adaptive=True)
    older = {k: v for k, v in plain.items() if k not in ("mesh", "adasum")}
    restored(SETUPS[1], older)
    with pytest.raises(OnwardError, match="older version saved it within an accumulation window"):
        restored(Setup({"dp_shard": 3, "tp": 1}, 1), {**older, "ranks": older["ranks"][:2]})
    with pytest.raises(OnwardError, match="the states of 3 ranks of a mesh of 2"):
        restored(SETUPS[1], {**plain, "mesh": [["dp_replicate", 2]]})
    with pytest.raises(OnwardError, match="it has no state of rank 0"):
        restored(SETUPS[1], {**plain, "ranks": [{}, {}, {}]})


def test_moments_in_blocks_go_through_parts() -> None:
    """Moments in 8 bits of parts along a dim are whole in the parameter's precision, and come back
    to the same codes."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(64, 128))
    model = torch.nn.Module()
    model.register_parameter("weight", weight)
    optimizer = onward.optim.AdamW()
    mesh = Mesh(("tp",), (2,), (1,))
    held = TorchOptimizer(model, to_torch(optimizer, model), "8bit", mesh=mesh)
    state = held.updates.state
    first = {slot: torch.rand(64, 128) for slot in ("exp_avg", "exp_avg_sq")}
    held.updates.adopt({weight: ParameterState(3, first)})
    assert state.tensors[weight]["exp_avg"].dtype == torch.uint8
    held.cut_tensors({weight: TensorCut("tp", 2, 1, Sharding(1))})
    codes = {name: x.clone() for name, x in state.tensors[weight].items()}
    assert codes["exp_avg"].shape == (64, 64) and codes["exp_avg_absmax"].shape == (16,)
    near = state.shown(weight)["exp_avg_sq"]
    assert torch.allclose(near, first["exp_avg_sq"][:, 64:], atol=0.02)
    whole = {slot: torch.cat([x, state.shown(weight)[slot]], 1)
             for slot, x in ((s, torch.zeros(64, 64)) for s in first)}  # fmt: skip
    held.updates.adopt({weight: ParameterState(3, whole)})
    for name, x in codes.items():
        assert torch.equal(state.tensors[weight][name], x), name
