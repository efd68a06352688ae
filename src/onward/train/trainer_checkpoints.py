"""TrainerCheckpoints: the methods of a Trainer that give its state or save it, and go on from what
was given or saved."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from onward.checkpoint import BackgroundWriter, folder_name, rotate, unwritten
from onward.distribute import MeetingKind
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
    read_alike,
    registered_part,
    require_storable,
    take_checkpoint,
)
from onward.train.exclusive import exclusive
from onward.train.held_optimizer import HeldOptimizer
from onward.train.loss_scale import Scaling
from onward.train.loss_spikes import LossSpikes
from onward.train.own_state import part_of
from onward.train.parameter_parts import ParameterParts
from onward.train.rank_states import RankStates
from onward.train.ranks import Position, Ranks
from onward.train.skipped_updates import SkippedUpdates
from onward.train.state import model_part
from onward.train.state_part import StatePart, live, restore, saved, taken_part
from onward.train.way_back import WayBack
from onward.train.weight_cuts import WeightCuts
from onward.train.window import AccumulationWindow


class TrainerCheckpoints:
    """The methods of a Trainer that give its state, write checkpoints, and go on from one.

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
    _window: AccumulationWindow
    _scaling: Scaling
    _spikes: LossSpikes
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

    def _check_idle(self) -> None:
        raise NotImplementedError

    def _check_whole(self) -> None:
        raise NotImplementedError

    def _check_not_torn(self) -> None:
        raise NotImplementedError

    def _follow_optimizer(self) -> None:
        raise NotImplementedError

    def _position(self) -> Position:
        raise NotImplementedError

    # ---- checkpoints

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
        Raises CheckpointError where the disk fails, and where a registered object's state is none
        that a file can hold; the checkpoints before it stay. Raises OnwardError where the ranks
        stand at other places of the run.
        """
        limit = read_limit("save_total_limit", save_total_limit)
        self._check_whole()
        self._ranks.require_together()
        with self._ranks.saving(self._position()):
            self._follow_for_state()
            self._optimizer.sync()
            own = live(self._own_parts())
            if not self._ranks.is_one:
                require_storable(own)
        folder = Path(output_dir)
        path = folder / self.checkpoint_name
        kept = [Path(each) for each in keep]
        taken = take_checkpoint(
            self.model,
            (taken_part(own), *self._state_parts(to_first=True)),
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
        store = self.memory.store
        read = None if store is None else store.release
        with self._ranks.writing_files():
            packed = taken.packed()
            if background:
                packed = packed.copied()
                self._optimizer.updates.release()

            def write() -> None:
                packed.write(path, read)
                self._way_back.checkpoint = path
                if limit is not None:
                    rotate(folder, path, limit, kept)

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
        """Waits until all checkpoints are written. All ranks of a mesh call it. Raises
        CheckpointError where the last one failed."""
        if not self._ranks.are_together:  # at the end of a run that has failed
            self._writer.finish()
        elif self._ranks.is_first:
            with self._ranks.writing_files(MeetingKind.WRITTEN):
                self._writer.finish()
        else:
            self._ranks.wait_for_files(MeetingKind.WRITTEN)

    @exclusive
    def resume(self, folder: str | Path, *, strict: bool = False) -> Path:
        """Goes on from a checkpoint, or from the newest in a folder that is whole; returns it.

        Every byte is compared with its sha256 before anything is changed. A damaged checkpoint is
        passed over with a warning; strict: it raises CheckpointError. Raises CheckpointError too
        where there is none, and OnwardError where it does not fit this model and optimizer; nothing
        is changed then. All ranks of a mesh call it: rank 0 chooses, and the others read the same
        files, which any mesh or one process may have saved; those of an open window of `adasum` the
        same mesh.
        """
        path, found = read_alike(self._ranks, Path(folder), strict, self._writer.wait)
        state = {**found.state, "model": found.model.state_dict()}
        self._follow_for_state()
        self._optimizer.require_owner()
        self._cuts.take(state, self._optimizer)
        with signals_wait():
            try:
                parts = (*self._own_parts(), *self._state_parts())
                restore(parts, self._rank_states().own_of(state))
            except OnwardError as error:
                raise OnwardError(f"{path}: {error}") from error
            self._run_id = str(found.facts["run"])
            self._way_back.checkpoint = path
            self._note_restored()
        return path

    @exclusive
    def load_weights(self, folder: str | Path) -> Path:
        """Gives the model the weights of a checkpoint, or of the newest in a folder that is whole;
        returns it. Optimizer, counters and all other state stay as they are. All ranks of a mesh
        call it, as `resume`.

        Raises what `resume` raises, and nothing is changed then.
        """
        self._average.require_own()
        path, found = read_alike(self._ranks, Path(folder), True, self._writer.wait)
        part = model_part(self.model, self._weights)
        restore((part,), {**found.state, "model": found.model.state_dict()})
        self._ranks.forget()
        return path

    # ---- state

    @exclusive
    def gather(self) -> None:
        """Gives the model its whole weights again, where each rank holds a part of them (`zero=3`,
        `tp`): to use it outside of the Trainer, to save or to change it. The next step cuts them
        anew. All ranks of a mesh call it. Does nothing where the weights are whole. Raises
        OnwardError while an update or a load is half made, and within `ema_weights`."""
        self._check_idle()
        self._check_not_torn()
        self._average.require_own()
        if self._weights.is_cut:
            self._ranks.meet_for_state(True)
            self._weights.gather()

    @exclusive
    def state_dict(self) -> dict[str, Any]:
        """Returns copies of the whole state for `load_state_dict`: `model` (its own keys),
        `optimizer` (`exp_avg.<parameter>`, ...), `param_groups` with their learning rates,
        counters, random state, and in fp16 the loss scale. Of an optimizer that makes its updates
        itself: its own `state_dict`, as `own_state`, in the place of the two of the optimizer.
        Raises OnwardError while an update or a load is half made, within `ema_weights`, and on
        several ranks within an accumulation window, whose sums are those of one rank."""
        self._check_whole()
        self._ranks.require_between_windows(self._window.is_first)
        self._ranks.meet_for_state(self.options.zero > 0 or self._weights.is_cut)
        self._follow_for_state()
        self._optimizer.sync()
        return saved(self._state_parts())

    @exclusive
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores a `state_dict` in place. Raises OnwardError where it does not fit this model,
        optimizer and accumulation window. Nothing has changed after an error, even one raised by a
        hook of the model. All ranks of a mesh call it with one state, that of any mesh or of one
        process."""
        self._follow_for_state()
        self._optimizer.require_owner()
        self._cuts.take(state, self._optimizer)
        state = self._rank_states().shared_out(state)
        with signals_wait():
            restore(self._state_parts(), state)
            self._note_restored()

    # ---- averaged weights

    @contextmanager
    def ema_weights(self) -> Generator[None]:
        """A context in which the model has its averaged weights (`TrainerOptions.ema_decay`), to
        evaluate or export it. Training, saving and loading raise OnwardError inside of it, and so
        does it without the option and while an update or a load is half made. Where ranks have
        parts of the weights, all enter it, `eval_step` reads averages, and `gather` comes first."""
        with self._lock:
            self._check_not_torn()
            self._ranks.meet_for_state(self._cuts.are_asked_for)
            with self._average.swapped_in():
                yield

    @exclusive
    def ema_state_dict(self) -> dict[str, Any]:
        """Returns a copy of the model's state_dict with the averaged weights, and with the buffers
        that it has now; all ranks with parts of weights call it. Raises OnwardError without the
        option `ema_decay`, and while an update or a load is half made."""
        self._check_not_torn()
        self._ranks.meet_for_state(self._cuts.are_asked_for)
        return self._average.state_dict()

    def _state_parts(self, to_first: bool = False) -> tuple[StatePart, ...]:
        """The parts of a state in the order in which they are restored. The optimizer's, which
        cannot be rolled back, is last. to_first: rank 0 alone saves tensors that are cut."""
        return (
            self._window.part(),
            self._scaling.part(),
            self._average.part(to_first),
            self._spikes.part(),
            self._cuts.part(self._optimizer),
            model_part(self.model, self._weights, to_first),
            part_of(self._optimizer, to_first),
        )

    def _follow_for_state(self) -> None:
        """Follows the optimizer before its state is saved or restored. A change that the next step
        will refuse does not matter to the state."""
        with suppress(OnwardError):
            self._follow_optimizer()

    def _rank_states(self) -> RankStates:
        """What each rank has for itself."""
        return RankStates(self._ranks.mesh, self._optimizer, self.options.adasum)

    def _note_restored(self) -> None:
        """Begins anew what counts from the state that was loaded last, which is of one moment."""
        self.memory.torn = self._optimizer.is_half_restored = False
        self._skipped.in_a_row = 0
        self._ranks.forget()

    def _own_parts(self) -> tuple[StatePart, ...]:
        """The parts of a checkpoint that each rank has for itself."""
        return random_part(), registered_part(self.registered)


__all__ = ["TrainerCheckpoints"]
