"""TrainerCheckpoints: the methods of a Trainer that save a run, and go on from what was saved."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from onward.checkpoint import BackgroundWriter, folder_name, rotate, unwritten
from onward.errors import OnwardError
from onward.execute import Memory
from onward.forks import Lock
from onward.option_readers import read_limit
from onward.options import TrainerOptions
from onward.signals import signals_wait
from onward.train.averaged_weights import AveragedWeights
from onward.train.checkpointing import (
    Stateful,
    check_stateful,
    random_part,
    read_newest,
    registered_part,
    take_checkpoint,
)
from onward.train.exclusive import exclusive
from onward.train.held_optimizer import HeldOptimizer
from onward.train.parameter_parts import ParameterParts
from onward.train.rank_states import RankStates
from onward.train.ranks import Ranks
from onward.train.skipped_updates import SkippedUpdates
from onward.train.state import model_part
from onward.train.state_part import StatePart, restore
from onward.train.way_back import WayBack
from onward.train.weight_cuts import WeightCuts


class TrainerCheckpoints:
    """The methods of a Trainer that write checkpoints, and go on from one.

    registered: objects whose state goes into checkpoints too. The attributes are set by the
    Trainer.
    """

    model: torch.nn.Module
    options: TrainerOptions
    memory: Memory
    registered: list[Stateful]
    _lock: Lock
    _run_id: str
    _writer: BackgroundWriter
    _optimizer: HeldOptimizer[Any]
    _average: AveragedWeights
    _skipped: SkippedUpdates
    _way_back: WayBack
    _ranks: Ranks
    _weights: ParameterParts
    _cuts: WeightCuts

    @property
    def updates(self) -> int:
        """The number of optimizer updates done."""
        raise NotImplementedError

    @property
    def micro_steps(self) -> int:
        """The number of micro-batches done in the open accumulation window."""
        raise NotImplementedError

    def _check_whole(self) -> None:
        raise NotImplementedError

    def _follow_for_state(self) -> None:
        raise NotImplementedError

    def _state_parts(self, to_first: bool = False) -> tuple[StatePart, ...]:
        raise NotImplementedError

    def register_for_checkpointing(self, *objects: Stateful) -> None:
        """Adds objects whose `state_dict` goes into checkpoints: learning rate schedulers, data
        loaders, counters of one's own. Raises OnwardError for what has no `load_state_dict`.

        They are told apart by their order, so that a resumed run registers the same ones.
        """
        check_stateful(objects)
        self.registered += objects

    @exclusive
    def save(
        self,
        output_dir: str | Path,
        *,
        background: bool = False,
        save_total_limit: int | None = None,
        keep: Iterable[str | Path] = (),
    ) -> Path:
        """Writes a checkpoint into `output_dir` and returns its folder, `checkpoint-<updates>`.

        It has the weights in Hugging Face's layout, the state of the optimizer, an open
        accumulation window, the loss scale, the random generators of Python, NumPy and PyTorch, and
        what was registered; `resume` goes on from it to the bit. It is whole or not there, whenever
        the process or the machine stops.

        background: copies the state and returns; a thread writes. A failure is then a warning, and
        raised by `finish_saves`. save_total_limit: checkpoints that are kept of this run, 1 or
        more. keep: checkpoints that are kept besides, such as the best one. All ranks of a mesh
        call it, and rank 0 writes, also the random generators and registered objects of the others.
        Raises CheckpointError where the disk fails; the checkpoints before it stay.
        """
        limit = read_limit("save_total_limit", save_total_limit)
        self._check_whole()
        self._follow_for_state()
        self._optimizer.sync()
        folder = Path(output_dir)
        path = folder / self.checkpoint_name
        kept = [Path(each) for each in keep]
        taken = take_checkpoint(
            self.model,
            self._checkpoint_parts(to_first=True),
            self._run_id,
            self.updates,
            self.micro_steps,
            self._rank_states(),
        )
        self._optimizer.updates.release()  # what ranks have gathered was read
        if not self._ranks.is_first:
            self._ranks.wait_for_files()
            self._way_back.checkpoint = path
            return path
        packed, store = taken.packed(), self.memory.store
        read = None if store is None else store.release
        if background:
            packed = packed.copied()
            self._optimizer.updates.release()

        def write() -> None:
            packed.write(path, read)
            self._way_back.checkpoint = path
            if limit is not None:
                rotate(folder, path, limit, kept)

        with self._ranks.writing_files():
            if background:
                self._writer.add(path, write)
                return path
            self._writer.wait()
            try:
                write()
            except OSError as error:
                raise unwritten(path, error) from error
        return path

    @property
    def checkpoint_name(self) -> str:
        """The name of the folder that `save` would write now."""
        return folder_name(self.updates, self.micro_steps)

    def finish_saves(self) -> None:
        """Waits until all checkpoints are written. Raises CheckpointError where the last one
        failed."""
        self._writer.finish()

    @exclusive
    def resume(self, folder: str | Path, *, strict: bool = False) -> Path:
        """Goes on from a checkpoint, or from the newest in a folder that is whole; returns it.

        Every byte is compared with its sha256 before anything is changed. A damaged checkpoint is
        passed over with a warning; strict: it raises CheckpointError. Raises CheckpointError too
        where there is none, and OnwardError where it does not fit this model and optimizer; nothing
        is changed then. All ranks of a mesh call it, and read the same files, which any mesh or one
        process may have saved; those of an open window of `adasum` the same mesh.
        """
        self._writer.wait()
        path, found = read_newest(Path(folder), strict)
        self._ranks.require_same_files(path.name, found.facts)
        state = {**found.state, "model": found.model.state_dict()}
        self._follow_for_state()
        self._optimizer.require_owner()
        self._cuts.take(state, self._optimizer)
        with signals_wait():
            try:
                restore(self._checkpoint_parts(), self._rank_states().own_of(state))
            except OnwardError as error:
                raise OnwardError(f"{path}: {error}") from error
            self._run_id = str(found.facts["run"])
            self._way_back.checkpoint = path
            self._note_restored()
        return path

    @exclusive
    def load_weights(self, folder: str | Path) -> Path:
        """Gives the model the weights of a checkpoint, or of the newest in a folder that is whole;
        returns it. Optimizer, counters and all other state stay as they are.

        Raises what `resume` raises, and nothing is changed then.
        """
        self._writer.wait()
        self._average.require_own()
        path, found = read_newest(Path(folder), strict=True)
        part = model_part(self.model, self._weights)
        restore((part,), {**found.state, "model": found.model.state_dict()})
        self._ranks.forget()
        return path

    def _rank_states(self) -> RankStates:
        """What each rank has for itself."""
        return RankStates(self._ranks.mesh, self._optimizer, self.options.adasum)

    def _note_restored(self) -> None:
        """Begins anew what counts from the state that was loaded last, which is of one moment."""
        self.memory.torn = self._optimizer.is_half_restored = False
        self._skipped.in_a_row = 0
        self._ranks.forget()

    def _checkpoint_parts(self, to_first: bool = False) -> tuple[StatePart, ...]:
        """The parts of a checkpoint, in the order in which they are restored. to_first: see
        `_state_parts`."""
        return (random_part(), registered_part(self.registered), *self._state_parts(to_first))


__all__ = ["TrainerCheckpoints"]
