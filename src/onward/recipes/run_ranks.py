"""The processes that torchrun starts for one `onward finetune`, the ranks of its mesh.

Every rank reads the texts, trains on the rows of its share of each micro-batch, and evaluates
batches of its own. Ranks along `tp`, `cp` and `pp` have one share together. Rank 0 alone prints,
and writes into the output folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous

from onward.distribute import DATA_AXES, Mesh, rank_on
from onward.errors import OnwardError, one_line
from onward.recipes.devices import BACKENDS
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.started_processes import started
from onward.recipes.stop_signals import Stopped
from onward.recipes.trainer_switches import sizes_of

Result = TypeVar("Result")
_FAILED = "onward finetune failed"  # a key of the store: which rank has said why


class RunRanks:
    """The processes of a run, and which of them this one is; one process by default.

    store: of torch.distributed, which outlives each of the processes. mesh: the axes along which
    the processes lie; None: all share the rows. has_parts: whether each holds a part of the
    weights, so that all of them evaluate together.
    """

    def __init__(
        self,
        rank: int = 0,
        ranks: int = 1,
        store: Any = None,
        mesh: Mesh | None = None,
        has_parts: bool = False,
    ) -> None:
        self.rank, self.ranks, self._store = rank, ranks, store
        self.mesh = Mesh(("dp_replicate",), (ranks,), (rank,)) if mesh is None else mesh
        self.has_parts = has_parts

    def of(self, config: FinetuneConfig) -> RunRanks:
        """The processes of this run in their places along the axes that the options write out."""
        sizes = sizes_of(config.mesh)
        if sizes is None:
            return self
        mesh = rank_on(sizes, self.rank)
        has_parts = config.zero == 3 or any(mesh.size(axis) > 1 for axis in ("tp", "pp"))
        return RunRanks(self.rank, self.ranks, self._store, mesh, has_parts)

    @property
    def is_first(self) -> bool:
        """Says whether this process prints, and writes into the output folder."""
        return self.rank == 0

    def shares(self, rows: Sequence[Any], size: int) -> list[Sequence[Any]]:
        """The rows of this rank's share, so many, in each micro-batch of an update, where the rows
        of share 0 come first."""
        mesh = self.mesh
        first = size * mesh.share
        starts = range(first, len(rows), size * mesh.batches)
        return [rows[start : start + size] for start in starts]

    def evaluates(self, count: int) -> Iterator[tuple[int, bool]]:
        """The index, below `count`, of each batch that this rank evaluates, and whether its number
        for that batch counts. Ranks that hold parts of the weights all evaluate equally often, and
        those with one share of the data the same batches, of which one rank's number counts."""
        if not self.has_parts:
            yield from ((place, True) for place in range(self.rank, count, self.ranks))
            return
        mesh = self.mesh
        is_told = not any(mesh.coordinate(axis) for axis in mesh.axes if axis not in DATA_AXES)
        for first in range(0, count, mesh.batches):
            place = first + mesh.share
            yield min(place, count - 1), is_told and place < count

    def largest(self, number: int) -> int:
        """The largest number of all ranks. Raises OnwardError where another one has ended."""
        if self.ranks == 1:
            return number
        told = torch.tensor(number, dtype=torch.int64)
        with _others_answer():
            distributed.all_reduce(told, distributed.ReduceOp.MAX)
        return int(told)

    def joined(self, numbers: Mapping[int, float], count: int) -> list[float]:
        """The numbers of all ranks by their places, each of which one rank has. Raises OnwardError
        where another rank has ended."""
        told = torch.zeros(count, dtype=torch.float64)
        for place, number in numbers.items():
            told[place] = number
        if self.ranks > 1:
            with _others_answer():
                distributed.all_reduce(told)  # adds zeros to each, so that it stays what it is
        return told.tolist()

    def gathered(self, found: Mapping[int, Result], count: int) -> list[Result]:
        """What all ranks have found by place, each of which one rank has. Raises OnwardError where
        another rank has ended."""
        if self.ranks == 1:
            return [found[place] for place in range(count)]
        told: list[Any] = [None] * self.ranks
        with _others_answer():
            distributed.all_gather_object(told, dict(found))
        joined = {place: one for part in told for place, one in part.items()}
        return [joined[place] for place in range(count)]

    def from_first(self, act: Callable[[], Result]) -> Result:
        """What rank 0 finds, which alone acts while the others wait. Raises what it raises, and on
        the others SystemExit, since rank 0 says why."""
        if self.ranks == 1:
            return act()
        told: list[Any] = [None, False]
        failed: Exception | None = None
        if self.is_first:
            try:
                told[0] = act()
            except Exception as error:
                failed, told[1] = error, True
        with _others_answer():
            distributed.broadcast_object_list(told, 0)
        if failed is not None:
            raise failed
        if told[1]:
            raise SystemExit(2)
        return told[0]

    def require_alike(self, facts: Mapping[str, Any]) -> None:
        """Raises InputError on a rank that has other facts than rank 0, and SystemExit on the
        others. The message names a fact by its key."""
        first = self.from_first(lambda: dict(facts))
        other = next((name for name, value in first.items() if facts[name] != value), None)
        is_any = self.largest(other is not None)
        if other is not None:
            raise InputError(
                f"rank {self.rank} has a different {other} than rank 0",
                "in the process of that rank",
                "give every process the same command line and files",
            )
        if is_any:
            raise SystemExit(2)

    def is_first_to_fail(self) -> bool:
        """Says whether no other rank has said why the run ends; this one says it then."""
        if self._store is None:
            return True
        try:
            return self._store.compare_set(_FAILED, "", str(self.rank)).decode() == str(self.rank)
        except Exception:  # the store is gone, with whoever kept it
            return True


@contextlib.contextmanager
def joined_ranks(device: str) -> Generator[RunRanks]:
    """A context with the processes of the run, joined over Gloo, and over NCCL for what is on GPUs.
    An error that ends it is said by one of them: the others end with status 2. device: the type of
    the device that they train on."""
    rank, ranks = started()
    if ranks == 1:
        yield RunRanks()
        return
    store, *_ = next(rendezvous("env://", rank, ranks))
    distributed.init_process_group(BACKENDS[device], store=store, rank=rank, world_size=ranks)
    run = RunRanks(rank, ranks, store)
    try:
        yield run
    except OnwardError as error:
        if not run.is_first_to_fail():
            raise SystemExit(2) from error
        raise
    except Stopped as stopped:
        if not run.is_first:  # all ranks are stopped, and rank 0 says so
            raise SystemExit(stopped.status) from stopped
        raise
    except Exception:
        run.is_first_to_fail()
        raise
    finally:
        distributed.destroy_process_group()


@contextlib.contextmanager
def _others_answer() -> Iterator[None]:
    """A context of an exchange. Raises OnwardError where another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        raise OnwardError(
            "another rank has ended or does not answer; fix: see what that rank printed (torch: "
            f"{one_line(str(error), 200)})"
        ) from error


__all__ = ["RunRanks", "joined_ranks"]
