"""The processes that torchrun starts for one `onward finetune`, the ranks of its mesh.

Every rank reads the texts, trains on its own rows of each micro-batch, and evaluates batches of its
own. Rank 0 alone prints, and writes into the output folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed.rendezvous import rendezvous

from onward.errors import OnwardError, one_line
from onward.mesh_sizes import AUTO, DATA_AXES, auto_sizes
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.started_processes import started
from onward.recipes.stop_signals import Stopped

Result = TypeVar("Result")
_FAILED = "onward finetune failed"  # a key of the store: which rank has said why


class RunRanks:
    """The processes of a run, and which of them this one is; one process by default.

    store: of torch.distributed, which outlives each of the processes.
    """

    def __init__(self, rank: int = 0, ranks: int = 1, store: Any = None) -> None:
        self.rank, self.ranks, self._store = rank, ranks, store

    @property
    def is_first(self) -> bool:
        """Says whether this process prints, and writes into the output folder."""
        return self.rank == 0

    def shares(self, batch: torch.Tensor, size: int) -> Sequence[torch.Tensor]:
        """The rows of this rank, i64[size,T], in each micro-batch of an update's batch
        i64[N,T], where the rows of rank 0 come first."""
        return [part.split(size)[self.rank] for part in batch.split(size * self.ranks)]

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
        others. The keys say what they are of."""
        first = self.from_first(lambda: dict(facts))
        other = next((name for name, value in first.items() if facts[name] != value), None)
        is_any = self.largest(other is not None)
        if other is not None:
            raise InputError(
                f"rank {self.rank} has read another {other} than rank 0",
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
def joined_ranks() -> Generator[RunRanks]:
    """A context with the processes of the run, joined over Gloo. An error that ends it is said by
    one of them: the others end with status 2."""
    rank, ranks = started()
    if ranks == 1:
        yield RunRanks()
        return
    store, *_ = next(rendezvous("env://", rank, ranks))
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
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


# ---- the switches


def sizes_of(mesh: str | None) -> dict[str, int] | None:
    """The number of ranks by axis in `dp_replicate=2,dp_shard=2`; None where there is no mesh."""
    if mesh is None:
        return None
    found: dict[str, int] = {}
    for part in mesh.split(","):
        axis, equals, size = (word.strip() for word in part.partition("="))
        if axis not in DATA_AXES or not equals or not size.isdecimal() or int(size) < 1:
            raise _wrong_mesh(mesh)
        if axis in found:
            raise _wrong_mesh(mesh)
        found[axis] = int(size)
    return found


def _wrong_mesh(mesh: str) -> InputError:
    return InputError(
        f"mesh is {mesh!r}", "in --mesh", f"write ranks by axis, such as dp_replicate=2, or {AUTO}"
    )


def with_mesh(config: FinetuneConfig, ranks: int) -> FinetuneConfig:
    """The options with the mesh of this many processes written out: `dp_replicate=2` for `auto`,
    and None for one process. Raises InputError where the processes are not those of the mesh, and
    for what several of them cannot do."""
    asked = None if config.mesh == AUTO else sizes_of(config.mesh)
    needed = prod(asked.values()) if asked else max(ranks, 2 if config.zero else 1)
    if needed != ranks:
        name = "mesh" if asked else "zero"
        value = config.mesh if asked else config.zero
        is_one = "one process is" if ranks == 1 else f"{ranks} processes are"
        raise InputError(
            f"{name} {value} needs {needed} processes, and {is_one} started",
            f"in --{name}",
            f"torchrun --nproc-per-node={needed} -m onward finetune ...",
        )
    if ranks == 1:
        return replace(config, mesh=None)
    sizes = asked or auto_sizes(ranks, config.zero)
    if config.zero and sizes.get("dp_shard", 1) == 1:
        raise InputError(
            f"zero {config.zero} cuts state over the ranks along dp_shard, of which there is one",
            f"in --zero with --mesh {config.mesh}",
            f"--mesh dp_shard={ranks}, or leave one of them out",
        )
    for name, is_given in (("compare", config.compare), ("engine", config.engine == "torch")):
        if is_given:
            raise InputError(
                f"eager PyTorch trains in one process, and {ranks} are started",
                f"in --{name}",
                "leave it out, or start the command without torchrun",
            )
    return replace(config, mesh=",".join(f"{axis}={size}" for axis, size in sizes.items()))


__all__ = ["RunRanks", "joined_ranks", "sizes_of", "with_mesh"]
