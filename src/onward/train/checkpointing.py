"""What of a Trainer goes into a checkpoint, and how it goes on from one."""

from __future__ import annotations

import logging
import platform
import random
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from onward.checkpoint import (
    Checkpoint,
    ModelState,
    checkpoints,
    config_files,
    damaged,
    is_checkpoint,
    read_checkpoint,
)
from onward.checkpoint.state_tree import encoded
from onward.errors import CheckpointError, OnwardError
from onward.train.rank_states import RANDOM, REGISTERED, RankStates
from onward.train.ranks import Ranks
from onward.train.state_part import State, StatePart, copied, live, require, unfit

log = logging.getLogger("onward")

# endings of the files that other libraries' checkpoints hold their state in
_PICKLES = frozenset({".pt", ".pth", ".bin", ".ckpt", ".pkl", ".distcp", ".tar"})


@runtime_checkable
class Stateful(Protocol):
    """An object with a state of its own, such as a learning rate scheduler or a data loader."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Any, /) -> Any: ...


def take_checkpoint(
    model: torch.nn.Module,
    parts: Sequence[StatePart],
    run: str,
    updates: int,
    micro_steps: int,
    ranks: RankStates | None = None,
) -> Checkpoint:
    """The state of a run as it is at this moment; its tensors are the run's own, not copies.

    parts: of the state, with one whose entry `model` is the model's. run: a name that checkpoints
    of one run share. ranks: what the ranks that take it together have each for itself; None: one
    process.
    """
    state = live(parts)
    weights = ModelState.of(model, state.pop("model"))
    if ranks is not None:
        state = ranks.of_all(state)
    facts = {
        "run": run,
        "updates": updates,
        "micro_steps": micro_steps,
        "model": type(model).__name__,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "onward": version("onward"),
        },
    }
    return Checkpoint(weights, state, facts, config_files(model))


def require_storable(state: State) -> None:
    """Raises CheckpointError, which names the place, for a value that no file can hold."""
    encoded(dict(state), "state", {})


def read_alike(
    ranks: Ranks, folder: Path, strict: bool, written: Callable[[], None]
) -> tuple[Path, Checkpoint]:
    """Reads what `read_newest` does, on all ranks of a mesh, which call it together: rank 0 chooses
    and tells its name, and the others read the one of that name.

    written: waits until this process has written its checkpoints. Raises CheckpointError on all
    ranks where one of them cannot read it, and where they have read other ones.
    """
    if ranks.is_one:
        written()
        return read_newest(folder, strict)
    found: tuple[Path, Checkpoint] | None = None
    failed: Exception | None = None
    if ranks.is_first:
        try:
            written()
            found = read_newest(folder, strict)
        except Exception as error:
            failed = error
    name = ranks.checkpoint_of_first("" if found is None else found[0].name, failed)
    if not ranks.is_first:
        try:
            found = _read_named(folder, name)
        except Exception as error:
            failed = error
    here, facts = (name, {}) if found is None else (found[0].name, found[1].facts)
    ranks.require_same_files(here, facts, failed)
    assert found is not None, "a rank that has failed raises its error"
    return found


def _read_named(folder: Path, name: str) -> tuple[Path, Checkpoint]:
    """Reads the checkpoint that a folder is, or the one of this name in it."""
    path = folder if is_checkpoint(folder) else folder / name
    if not is_checkpoint(path):
        raise CheckpointError(
            f"{folder} has no {name}, which rank 0 has read; fix: name the checkpoint's own "
            "folder, on a file system that all ranks see"
        )
    return path, read_checkpoint(path)


def read_newest(folder: Path, strict: bool) -> tuple[Path, Checkpoint]:
    """Reads the checkpoint that a folder is, or the newest in it that is whole.

    strict: whether a newer one that is damaged raises CheckpointError, instead of a warning. Raises
    CheckpointError where there is none, where all are damaged, and for checkpoints of several runs.
    """
    if is_checkpoint(folder):
        return folder, read_checkpoint(folder)
    found, broken = checkpoints(folder), damaged(folder)
    for error in broken:
        if strict:
            raise error
        log.warning("%s; this checkpoint is passed over", error)
    runs = {each.manifest.run for each in found}
    if len(runs) > 1:
        raise CheckpointError(
            f"{folder} holds checkpoints of {len(runs)} runs; fix: name one, such as "
            f"{found[0].path}"
        )
    for each in found:
        try:
            return each.path, read_checkpoint(each.path)
        except CheckpointError as error:
            if strict:
                raise
            log.warning("%s; this checkpoint is passed over", error)
    raise _none(folder, len(found) + len(broken))


def _none(folder: Path, damaged_ones: int) -> CheckpointError:
    """The error of a folder without a checkpoint that is whole."""
    if damaged_ones:
        return CheckpointError(f"none of the {damaged_ones} checkpoints in {folder} is whole")
    places = (folder, *sorted(folder.glob("checkpoint-*")))
    pickles = [
        path for place in places for path in sorted(place.glob("*")) if path.suffix in _PICKLES
    ]
    if pickles:
        return CheckpointError(
            f"{folder} holds a checkpoint of another library, whose {pickles[0].name} is a pickle, "
            "which can run code when it is read; fix: load its weights with from_pretrained, and "
            "its optimizer's state by torch.load(weights_only=True) in your own code"
        )
    return CheckpointError(
        f"there is no checkpoint in {folder}; fix: name a folder of Trainer.save"
    )


# ---- parts of the state that only a checkpoint has


def random_part() -> StatePart:
    """The states of the random generators of Python, NumPy and PyTorch, on each device."""

    def save() -> dict[str, Any]:
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        return {
            RANDOM: {
                "python": _python_state(),
                "numpy": np.random.get_state(legacy=False),
                "torch": torch.get_rng_state(),
                "cuda": cuda,
            }
        }

    def put(held: Mapping[str, Any]) -> None:
        version, words, gauss = held["python"]
        random.setstate((version, tuple(words.tolist()), gauss))
        np.random.set_state(held["numpy"])
        torch.set_rng_state(held["torch"])
        if held["cuda"] and torch.cuda.is_available():
            torch.cuda.set_rng_state_all(held["cuda"][: torch.cuda.device_count()])

    def check(state: State) -> None:
        require(state, RANDOM)
        before = save()[RANDOM]
        try:
            put(state[RANDOM])
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise unfit(f"random: {error!r}") from error
        finally:
            put(before)

    def restore(state: State) -> Callable[[], None]:
        before = save()[RANDOM]
        put(state[RANDOM])
        return lambda: put(before)

    return StatePart(save, check, restore)


def _python_state() -> tuple[int, np.ndarray, float | None]:
    version, words, gauss = random.getstate()
    return version, np.array(words, dtype=np.uint32), gauss


def registered_part(objects: Sequence[Stateful]) -> StatePart:
    """The states of the objects that the user registered, in their order."""

    def save() -> dict[str, Any]:
        return {REGISTERED: [[type(o).__qualname__, o.state_dict()] for o in objects]}

    def check(state: State) -> None:
        require(state, REGISTERED)
        given = [name for name, _ in state[REGISTERED]]
        own = [type(o).__qualname__ for o in objects]
        if given != own:
            raise unfit(
                f"it holds the states of {given or 'no objects'}, but {own or 'no objects'} are "
                "registered for checkpointing here"
            )

    def restore(state: State) -> Callable[[], None]:
        before = [copied(o.state_dict()) for o in objects]  # copies: it may be the object's dict

        def back() -> None:
            for o, held in zip(objects, before, strict=True):
                o.load_state_dict(held)

        try:
            for o, (_, held) in zip(objects, state[REGISTERED], strict=True):
                o.load_state_dict(held)
        except BaseException:
            back()
            raise
        return back

    return StatePart(save, check, restore)


def check_stateful(objects: Sequence[Any]) -> None:
    """Raises OnwardError for objects without a state of their own."""
    for o in objects:
        if not isinstance(o, Stateful):
            raise OnwardError(
                f"{type(o).__name__} has no state_dict and load_state_dict, so that it cannot be "
                "registered for checkpointing"
            )


__all__ = [
    "Stateful",
    "check_stateful",
    "random_part",
    "read_newest",
    "registered_part",
    "take_checkpoint",
]
