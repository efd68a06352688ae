"""RankEvaluation: one evaluation on the ranks of a mesh, each with batches of its own, and the
numbers that all of them get."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch.utils.data import DistributedSampler

from onward.distribute import DATA_AXES, MeetingKind, ranks_of
from onward.errors import OnwardError
from onward.prepare.batch import Batch
from onward.train import Trainer
from onward.train.ranks import digest

Part = TypeVar("Part")


@dataclass
class LossSums:
    """Adds up mean losses of batches, weighted by their samples, so that `means` are those over all
    samples. samples, batches: how many have been added. sums: by name of the loss."""

    samples: int = 0
    batches: int = 0
    sums: dict[str, float] = field(default_factory=dict)

    def add(self, losses: Mapping[str, torch.Tensor], samples: int) -> None:
        """Adds the mean losses of a batch of this many samples."""
        for name, loss in losses.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(loss) * samples
        self.samples += samples
        self.batches += 1

    def means(self) -> dict[str, float]:
        """The means over all samples."""
        return {name: total / max(self.samples, 1) for name, total in self.sums.items()}


class RankEvaluation:
    """The part that this rank has in an evaluation. One rank has all of it.

    Ranks along `tp`, `cp` and `pp` give the same batches, which count once; and where all ranks
    give the same ones, those of rank 0 count alone.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._mesh, zero = trainer.snapshot().mesh, trainer.options.zero
        cut = any(self._mesh.size(axis) > 1 for axis in ("tp", "pp"))
        # with parts, the ranks exchange numbers before each batch, and report failures by that
        self.has_parts = zero == 3 or cut
        self._digest = hashlib.blake2b()
        self._counted = [0]  # ranks whose batches count

    def reporting_failures(self) -> AbstractContextManager[None]:
        """Returns a context for the evaluation loop: an exception in it is reported to the other
        ranks, which would otherwise wait for this one."""
        return nullcontext() if self.has_parts else self._mesh.telling()

    def seen(self, batch: Batch) -> None:
        """Notes a batch, by which the ranks tell whether theirs are the same."""
        if self._mesh.batches > 1:
            self._digest.update(digest(*batch.tensors).encode())

    def last_samples(self, batches: Iterable[Any]) -> tuple[int, int]:
        """The number of the batch with a sample that torch's DistributedSampler has repeated, so
        that the ranks have equally many, and how many; 0 where there is none."""
        loader: Any = batches
        sampler = getattr(loader, "sampler", None)
        if self._mesh.batches == 1 or not isinstance(sampler, DistributedSampler):
            return 0, 0
        held: Any = sampler.dataset
        place = (sampler.num_samples - 1) * sampler.num_replicas + sampler.rank
        is_repeated = not sampler.drop_last and place >= len(held)
        return (len(loader), 1) if is_repeated else (0, 0)

    def joined(self, own: LossSums, asked: Sequence[str]) -> LossSums:
        """The sums of all ranks. asked: the names of what is computed of outputs. Raises
        OnwardError where another rank computes something else."""
        mesh = self._mesh
        if mesh.ranks == 1:
            return own
        facts = {f"sum {name}": total.hex() for name, total in own.sums.items()}
        facts |= {"samples": str(own.samples), "batches": str(own.batches)}
        facts |= {"asked": repr(sorted(asked)), "digest": self._digest.hexdigest()}
        told = mesh.gathered_facts(facts, MeetingKind.SCORES)
        other = next((r for r, f in enumerate(told) if f["asked"] != told[0]["asked"]), None)
        if other is not None:
            raise OnwardError(
                f"rank {other} evaluates by the metrics {told[other]['asked']}, and rank 0 by "
                f"{told[0]['asked']}; fix: give every rank the same compute_metrics and metrics"
            )
        every = ranks_of(mesh.axes, mesh.sizes)
        others = [axis for axis in mesh.axes if axis not in DATA_AXES]
        firsts = [m.rank for m in every if not any(map(m.coordinate, others))]
        is_one = len({told[rank]["digest"] for rank in firsts}) == 1
        self._counted = firsts[:1] if is_one else firsts
        found = LossSums()
        for rank in self._counted:
            found.samples += int(told[rank]["samples"])
            found.batches += int(told[rank]["batches"])
            for name, total in told[rank].items():
                if name.startswith("sum "):
                    key = name.removeprefix("sum ")
                    found.sums[key] = found.sums.get(key, 0.0) + float.fromhex(total)
        return found

    def collected(self, parts: Sequence[Part]) -> list[Part]:
        """Gathers one entry per batch from all ranks on rank 0, in accelerate's order: the first
        batch of every rank, then the second of every rank. Other ranks get an empty list."""
        if self._mesh.ranks == 1:
            return list(parts)
        own = list(parts) if self._mesh.rank in self._counted else []
        told: list[list[Part]] = self._mesh.gathered_states(own, MeetingKind.SCORES)
        return [part for row in zip_longest(*told) for part in row if part is not None]

    def computed(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The values of metrics that have seen the batches of this rank. Those of torchmetrics join
        what all ranks have. Raises OnwardError for others where ranks have batches of their own."""
        joins = len(self._counted) > 1
        for name, metric in metrics.items() if joins else ():
            has_own = getattr(metric, "sync_on_compute", False)
            if not has_own or len(self._counted) < self._mesh.ranks:
                what = "syncs over all processes" if has_own else "has no distributed sync"
                raise OnwardError(
                    f"the metric {name!r} {what}, and {len(self._counted)} of {self._mesh.ranks} "
                    "ranks have evaluation batches of their own; fix: pass compute_metrics, or a "
                    "torchmetrics metric on a mesh of data axes only (dp_replicate, dp_shard)"
                )
        with ExitStack() as stack:
            for metric in () if joins or self._mesh.ranks == 1 else metrics.values():
                stack.enter_context(_alone(metric))
            return {name: metric.compute() for name, metric in metrics.items()}

    def of_first(self, make: Callable[[], Mapping[str, float]]) -> dict[str, float]:
        """Calls `make` on rank 0 and returns its numbers, by name, on every rank."""
        own: Mapping[str, float] = {}
        with self._mesh.telling():
            if self._mesh.rank == 0:
                own = make()
        said = {name: float(number).hex() for name, number in own.items()}
        told = self._mesh.gathered_facts(said, MeetingKind.SCORES)[0]
        return {name: float.fromhex(number) for name, number in told.items()}


@contextmanager
def _alone(metric: Any) -> Iterator[None]:
    """A context in which a metric of torchmetrics does not join those of other processes."""
    before = getattr(metric, "distributed_available_fn", None)
    if before is None:
        yield
        return
    metric.distributed_available_fn = _no_others
    try:
        yield
    finally:
        metric.distributed_available_fn = before


def _no_others() -> bool:
    return False


__all__ = ["LossSums", "RankEvaluation"]
