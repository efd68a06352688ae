"""RankLoop: what the loops of the ranks of a mesh compare and agree upon, so that all of them
train, evaluate, save and end together."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from onward.distribute import MeetingKind, Mesh
from onward.errors import OnwardError
from onward.prepare.batch import bind_batch
from onward.train import Trainer
from onward.train.ranks import digest

log = logging.getLogger("onward")

_ASKED = (  # what callbacks may ask for, by the names of transformers' TrainerControl
    "should_log", "should_evaluate", "should_save", "should_epoch_stop", "should_training_stop",
)  # fmt: skip


class RankLoop:
    """The loop of this rank, and those of the others. On one rank nothing is exchanged."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._has_looked = False

    @property
    def mesh(self) -> Mesh:
        """The ranks, which the first step of a Trainer with mesh="auto" may choose anew."""
        return self._trainer.snapshot().mesh

    def require_alike(self, facts: Mapping[str, Any]) -> None:
        """Raises OnwardError unless all ranks pass equal facts, which the message names by key."""
        mesh = self.mesh
        if mesh.ranks == 1:
            return
        told = mesh.gathered_facts({k: repr(v) for k, v in facts.items()}, MeetingKind.LOOP)
        for rank, found in enumerate(told):
            for name, said in found.items():
                if said != told[0][name]:
                    raise OnwardError(
                        f"{name} on rank {rank} ({said}) is not that of rank 0 ({told[0][name]}), "
                        "so that the ranks would not evaluate, save and end together; fix: give "
                        "every rank the same options, and loaders with equally many batches, such "
                        "as by a DistributedSampler"
                    )

    def agree(self, control: Any) -> None:
        """Sets in `control`, transformers' TrainerControl, what a callback of any rank asks for."""
        mesh = self.mesh
        if mesh.ranks == 1:
            return
        rows = mesh.gathered(MeetingKind.LOOP, [int(getattr(control, name)) for name in _ASKED])
        for name, asked in zip(_ASKED, zip(*rows, strict=True), strict=True):
            setattr(control, name, any(asked))

    def on_all(self, here: bool) -> bool:
        """Whether something that is so `here` is so on every rank."""
        mesh = self.mesh
        if mesh.ranks == 1:
            return here
        return all(row[0] for row in mesh.gathered(MeetingKind.LOOP, [int(here)]))

    def warn_if_batches_repeat(self, given: Any) -> None:
        """Warns where ranks that share the batches have the same first one, as where each reads the
        whole dataset in one order. given: as `train_step` takes it."""
        mesh, seen = self.mesh, self._has_looked
        self._has_looked = True
        if seen or mesh.batches == 1:
            return
        batch = bind_batch((given,), {}, self._trainer.loss_fn is not None)
        said = f"{mesh.share} {digest(*batch.tensors)}" if batch.batch_size else ""
        told = mesh.gathered_facts({"batch": said}, MeetingKind.LOOP)
        shares = {tuple(each["batch"].split()) for each in told if each["batch"]}
        if mesh.rank == 0 and len({text for _, text in shares}) < len(shares):
            log.warning(
                "ranks have the same samples in their first batch, as where each of them reads the "
                "whole dataset, so that an epoch trains each sample more than once; fix: "
                "ResumableDataLoader(..., num_replicas=%d, rank=the rank), or a DistributedSampler",
                mesh.batches,
            )


__all__ = ["RankLoop"]
