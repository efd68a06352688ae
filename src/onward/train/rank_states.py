"""RankStates: what each rank of a mesh has for itself in a checkpoint, and how the ranks of another
mesh go on from it.

Random generators and registered objects go with the share of the batch: a rank takes those of the
first rank that had its share. Sums of an open accumulation window are terms of one total, so that
other ranks go on from the total.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

from onward.distribute import DATA_AXES, Mesh, ranks_of
from onward.errors import OnwardError
from onward.mesh_sizes import SUMMED_AXES
from onward.train.cut_tensors import (
    Cut,
    add_part,
    axes_of,
    described,
    is_elsewhere,
    part_of,
    row_of,
    stage_of,
)
from onward.train.held_optimizer import HeldOptimizer
from onward.train.optimizer_state import ACCUMULATOR
from onward.train.state_part import State, unfit
from onward.train.torch_optimizer import TorchOptimizer
from onward.train.window import REPLICA_SUMS

log = logging.getLogger("onward")

RANDOM, REGISTERED = "random", "registered"  # entries of a checkpoint that each rank has for itself
_RANKS, _MESH, _SUMS, _PARTS = "ranks", "mesh", "sums", "sum_parts"
_ADAPTIVE = "adasum"  # whether the sums are those of replicas, which adasum combines
_PREFIX = f"{ACCUMULATOR}."  # begins the names of sums


@dataclass(frozen=True)
class SavedRanks:
    """The states of the ranks that saved a checkpoint, and their places. adaptive: whether adasum
    combines their sums. is_known: whether the checkpoint says what mesh they had."""

    meshes: list[Mesh]
    states: list[State]
    adaptive: bool = False
    is_known: bool = True

    @classmethod
    def of(cls, state: State, here: Mesh) -> SavedRanks:
        """The ranks that saved a state. here: the ranks that go on from it; checkpoints of older
        versions do not name their mesh, and are taken to have the same where its ranks are as
        many."""
        if _RANKS not in state:
            sums = {n: x for n, x in state["optimizer"].items() if n.startswith(_PREFIX)}
            return cls([Mesh()], [{**state, _SUMS: sums, _PARTS: {}}])
        states = list(state[_RANKS])
        if _MESH in state:
            meshes = ranks_of(*zip(*((str(axis), int(n)) for axis, n in state[_MESH]), strict=True))
        elif len(states) == here.ranks:
            meshes = ranks_of(here.axes, here.sizes)
        else:
            meshes = ranks_of(("dp_replicate",), (len(states),))
        if len(meshes) != len(states):
            raise unfit(f"it has the states of {len(states)} ranks of a mesh of {len(meshes)}")
        adaptive = bool(state.get(_ADAPTIVE, REPLICA_SUMS in states[0]))
        return cls(meshes, states, adaptive, _MESH in state)

    @property
    def shares(self) -> int:
        """The number of shares that each batch had."""
        return self.meshes[0].batches

    def like(self, here: Mesh) -> bool:
        """Says whether the ranks had the places that those of a mesh have."""
        return _sizes(self.meshes[0]) == _sizes(here)

    def rank_for(self, here: Mesh) -> int | None:
        """The rank whose generators and objects a rank goes on with; None: it has a share that no
        rank had."""
        if self.like(here):
            return here.rank
        return next((r for r, mesh in enumerate(self.meshes) if mesh.share == here.share), None)

    def total(self, name: str, like: torch.Tensor, is_mean: bool) -> torch.Tensor:
        """The sum over all ranks of what each has added up of a gradient, or the mean. name: its
        entry. like: the parameter."""
        total = torch.zeros(like.shape, dtype=torch.float64)
        terms = 0
        for mesh, state in zip(self.meshes, self.states, strict=True):
            if name not in state[_SUMS]:
                continue  # of another stage
            said = state[_PARTS].get(name, [])
            kinds = [kind for kind, *_ in said]
            if mesh.coordinate("tp") and "dim" not in kinds:
                continue  # ranks along tp have the same sum
            if "row" in kinds and (mesh.coordinate("dp_replicate") or mesh.coordinate("cp")):
                continue  # rows are summed over all ranks in each micro-batch
            add_part(total, said, state[_SUMS][name].cpu().double())
            terms = 1 if "row" in kinds else mesh.batches
        return (total / terms if is_mean else total).to(like.dtype)


class RankStates:
    """What the ranks of a Trainer have each for themselves. mesh: the ranks. held: the optimizer,
    with the sums of a window. adaptive: whether adasum combines them."""

    def __init__(self, mesh: Mesh, held: HeldOptimizer[Any], adaptive: bool = False) -> None:
        self._mesh, self._held, self._adaptive = mesh, held, adaptive

    def of_all(self, state: State) -> dict[str, Any]:
        """A state with what each rank has for itself, for rank 0 to write. All ranks call it."""
        if self._mesh.ranks == 1:
            return dict(state)
        own = {k: state[k] for k in (RANDOM, REGISTERED, REPLICA_SUMS) if k in state}
        shared = {key: value for key, value in state.items() if key not in own}
        own[_SUMS] = {n: x for n, x in state["optimizer"].items() if n.startswith(_PREFIX)}
        own[_PARTS] = self._parts(own[_SUMS])
        made = {_MESH: [list(each) for each in _sizes(self._mesh)], _ADAPTIVE: self._adaptive}
        return {**shared, **made, _RANKS: self._mesh.gathered_states(own)}

    def own_of(self, state: State) -> State:
        """The state of a checkpoint that this rank goes on from. All ranks call it. Raises
        OnwardError for what other ranks cannot go on from."""
        if self._mesh.ranks == 1 and _RANKS not in state:
            return state
        try:
            saved = SavedRanks.of(state, self._mesh)
            return self._with_sums({**state, **self._by_share(saved)}, saved)
        except OnwardError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise unfit(f"it has no state of rank {self._mesh.rank}: {error!r}") from error

    def shared_out(self, state: Any) -> Any:
        """A Trainer's state_dict as this rank restores it: sums of an open window are the total, of
        which each rank takes its part. All ranks call it."""
        if self._mesh.ranks == 1 or not isinstance(state, Mapping) or not state.get("micro_steps"):
            return state
        if not isinstance(state.get("optimizer"), Mapping):
            return state
        try:
            return self._with_sums(state, SavedRanks.of(state, self._mesh))
        except OnwardError:
            raise
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise unfit(f"its sums of an open window: {error!r}") from error

    # ---- by share

    def _by_share(self, saved: SavedRanks) -> dict[str, Any]:
        """Random generators and registered objects."""
        rank, first = saved.rank_for(self._mesh), saved.states[0]
        if not saved.like(self._mesh):
            self._check_registered(saved)
        more = self._mesh.batches - saved.shares
        if more > 0 and self._mesh.rank == 0:
            log.warning(
                "the checkpoint has random generators for %d shares of a batch; those of the other "
                "%d follow from rank 0's and the number of the share",
                saved.shares,
                more,
            )
        if rank is not None:
            own = saved.states[rank]
            return {RANDOM: own[RANDOM], REGISTERED: own[REGISTERED]}
        return {
            RANDOM: _random_of_share(first[RANDOM], self._mesh.share),
            REGISTERED: first[REGISTERED],
        }

    def _check_registered(self, saved: SavedRanks) -> None:
        """Raises OnwardError where registered objects have a state for each share, and the shares
        are others here."""
        given = [state[REGISTERED] for state in saved.states]
        if saved.shares == self._mesh.batches or all(_equal(each, given[0]) for each in given):
            return
        raise unfit(
            f"the registered {', '.join(name for name, _ in given[0])} have a state of their own "
            f"for each of {saved.shares} shares of a batch, and {self._mesh.batches} train here; "
            "fix: as many ranks along dp_replicate and dp_shard, or register objects whose state "
            "is the same on every rank"
        )

    # ---- sums of an open window

    def _with_sums(self, state: State, saved: SavedRanks) -> State:
        """A state with this rank's sums."""
        if not state.get("micro_steps"):
            return state
        others = {n: x for n, x in state["optimizer"].items() if not n.startswith(_PREFIX)}
        if self._mesh.agreed(self._are_alike(saved)):
            own = saved.states[self._mesh.rank]
            replica = {key: own[key] for key in (REPLICA_SUMS,) if key in own}
            return {**state, **replica, "optimizer": {**others, **own[_SUMS]}}
        self._check_summable(saved)
        is_mean = not state.get("window_by_labels", False)
        names = dict.fromkeys(name for each in saved.states for name in each[_SUMS])
        here = [name for name in names if self._is_here(name)]
        sums = {name: self._own_sum(name, saved, is_mean) for name in here}
        return {**state, "optimizer": {**others, **sums}}

    def _are_alike(self, saved: SavedRanks) -> bool:
        """Says whether the rank in this one's place had the sums that this one would have."""
        if not saved.like(self._mesh):
            return False
        state = saved.states[self._mesh.rank]
        if not saved.is_known:
            return True
        return self._adaptive == saved.adaptive and self._parts(state[_SUMS]) == state[_PARTS]

    def _check_summable(self, saved: SavedRanks) -> None:
        """Raises OnwardError for sums that have no total here."""
        before, here = saved.meshes[0], self._mesh
        if self._adaptive or saved.adaptive:
            raise unfit(
                f"it was saved within an accumulation window, on {before}, and {here} goes on "
                "here; adasum combines the gradients of replicas, which have no total; fix: the "
                "same mesh and options, or save between updates"
            )
        held = self._held
        if isinstance(held, TorchOptimizer) and held.updates.state.shards.await_sums:
            raise unfit(
                f"it was saved within an accumulation window, on {before}, and {here} with zero=2 "
                "or 3 has still to choose its cuts along tp or its stages, by which the sums would "
                "be cut; fix: save between updates, or zero=1"
            )
        if not saved.is_known:
            raise unfit(
                f"an older version saved it within an accumulation window, on {before.ranks} "
                f"ranks, and {here.ranks} go on here; fix: as many ranks, or save between updates"
            )

    def _own_sum(self, name: str, saved: SavedRanks, is_mean: bool) -> torch.Tensor:
        """The sum that this rank goes on from: its part of the total on the ranks that come first
        along the axes of data, `cp`, and among those whose stages read the parameter; zeros on the
        others. Of a mean, ranks along the axes of data all have their part, and of rows those along
        `cp` too."""
        parameter = self._parameters()[name]
        total = saved.total(name, parameter, is_mean)
        cut = self._cut(name)
        part = total if cut is None else part_of(cut, total)
        axes = set(SUMMED_AXES) - (set(DATA_AXES) if is_mean else axes_of(cut))
        axes = axes if row_of(cut) is None else set[str]()
        stage = stage_of(cut)
        is_first = stage is None or stage.place == stage.owner
        is_holder = is_first and not any(map(self._mesh.coordinate, axes))
        return part if is_holder else torch.zeros_like(part)

    def _is_here(self, name: str) -> bool:
        """Says whether this rank sums a gradient: a stage may lack its parameter."""
        return not is_elsewhere(self._cut(name))

    def _parts(self, sums: State) -> dict[str, Any]:
        """Says which parts this rank has of the sums that are cut."""
        cuts = {name: self._cut(name) for name in sums}
        return {name: described(cut) for name, cut in cuts.items() if cut is not None}

    def _cut(self, name: str) -> Cut | None:
        held = self._held
        if not isinstance(held, TorchOptimizer):
            return None
        return held.updates.state.shards.of_sums(self._parameters()[name])

    def _parameters(self) -> dict[str, torch.Tensor]:
        """The parameters, by the names of their sums."""
        return {f"{_PREFIX}{path}": p for path, p in self._held.model.named_parameters()}


def _sizes(mesh: Mesh) -> list[tuple[str, int]]:
    """The axes of several ranks."""
    return [(axis, n) for axis, n in zip(mesh.axes, mesh.sizes, strict=True) if n > 1]


def _equal(a: Any, b: Any) -> bool:
    """Says whether two states are the same, bit by bit."""
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        return both and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b)


def _random_of_share(first: State, share: int) -> dict[str, Any]:
    """The states of generators for a share that has none yet. first: those of rank 0."""
    data = first["torch"].numpy().tobytes() + share.to_bytes(8, "little")
    seed = int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
    version, words, gauss = random.Random(seed).getstate()
    devices = torch.cuda.device_count() if first["cuda"] and torch.cuda.is_available() else 0
    return {
        "python": (version, np.array(words, dtype=np.uint32), gauss),
        "numpy": np.random.RandomState(seed % (1 << 32)).get_state(legacy=False),
        "torch": torch.Generator().manual_seed(seed).get_state(),
        "cuda": [
            torch.Generator(device=f"cuda:{i}").manual_seed(seed).get_state()
            for i in range(devices)
        ],
    }


__all__ = ["RANDOM", "REGISTERED", "RankStates", "SavedRanks"]
