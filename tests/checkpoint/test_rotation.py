"""Rotation removes the oldest checkpoints: never the newest of a run, never another run's."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from checkpoint_faults import checkpoint, is_whole
from hypothesis import given, settings
from hypothesis import strategies as st

import onward
from onward.checkpoint import checkpoints, folder_name, read_checkpoint, rotate, settle
from onward.errors import OnwardError

Saved = tuple[str, int, int]  # a run, its updates, micro-batches of the open window
SAVES = st.lists(
    st.tuples(st.sampled_from("ab"), st.integers(0, 12), st.integers(0, 2)), min_size=1, max_size=8
)


@given(SAVES, st.integers(1, 3), st.integers(0, 2**31))
def test_what_is_left(saves: list[Saved], limit: int, clock: int) -> None:
    """A model of what may be removed: after each save of a run, all but the one just written and
    its `limit - 1` newest, of this run alone. Clocks go anywhere."""
    folder = Path(tempfile.mkdtemp())
    held: dict[str, Saved] = {}
    for run, updates, micro_steps in saves:
        name = f"checkpoint-{updates}-{micro_steps}" if micro_steps else f"checkpoint-{updates}"
        checkpoint(updates, run, micro_steps, numbers=1).packed().write(folder / name)
        os.utime(folder / name, (clock, clock))
        held[name] = (run, updates, micro_steps)
        rotate(folder, folder / name, limit)
        others = sorted(
            (n for n, save in held.items() if save[0] == run and n != name),
            key=lambda n: held[n][1:], reverse=True,
        )  # fmt: skip
        for gone in others[limit - 1 :]:
            del held[gone]
        assert {path.name for path in folder.iterdir()} == set(held)
        assert all(is_whole(read_checkpoint(found.path)) for found in checkpoints(folder))
    shutil.rmtree(folder)


def test_folders_of_other_kinds_stay(tmp_path: Path) -> None:
    for name in ("checkpoint-3", "checkpoint-best", "logs"):  # the first is another library's
        (tmp_path / name).mkdir()
        (tmp_path / name / "kept").write_text("")
    for updates in (1, 2):
        checkpoint(updates).packed().write(tmp_path / f"checkpoint-{updates}")
    rotate(tmp_path, tmp_path / "checkpoint-2", 1)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"checkpoint-2", "checkpoint-3", "checkpoint-best", "logs"}


def test_what_a_living_process_writes_stays(tmp_path: Path) -> None:
    checkpoint(1).packed().write(tmp_path / "checkpoint-1")
    for pid in (os.getpid(), 2**22 + 1):  # the second is above all that there may be
        (tmp_path / f".checkpoint-2.{pid}-01234567").mkdir()
    rotate(tmp_path, tmp_path / "checkpoint-1", 1)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"checkpoint-1", f".checkpoint-2.{os.getpid()}-01234567"}


@pytest.mark.parametrize("limit", [0, -1, True, 1.5, "2"])
def test_limits_that_are_none(limit: object, tmp_path: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    trainer = onward.Trainer(
        layer, torch.optim.SGD(layer.parameters(), 0.1), loss_fn=torch.nn.functional.mse_loss
    )
    with pytest.raises(OnwardError, match=r"save_total_limit=.* is invalid; fix: a whole number"):
        trainer.save(tmp_path, save_total_limit=limit)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_hidden_checkpoints_of_killed_processes_are_settled(tmp_path: Path) -> None:
    """One that is whole gets its name, unless another has it; what is half written goes."""
    hidden = {number: f".checkpoint-{number}.5-0000000{number}" for number in (1, 2, 3)}
    for number, name in [(1, "checkpoint-1"), *hidden.items()]:
        checkpoint(number).packed().write(tmp_path / name)
    (tmp_path / hidden[3] / "manifest.json").unlink()
    (tmp_path / ".other").mkdir()
    settle(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"checkpoint-1", "checkpoint-2", ".other"}
    assert is_whole(read_checkpoint(tmp_path / "checkpoint-2"))


@settings(max_examples=40)
@given(SAVES, st.integers(1, 2), st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)))
def test_one_that_is_whole_is_left_and_those_to_keep(
    saves: list[Saved], limit: int, best: set[int], broken: set[int]
) -> None:
    """After each save the one just written is whole, though the disk has damaged those before it,
    whatever run their names are of; and what is to be kept is there."""
    folder = Path(tempfile.mkdtemp())
    keep: set[Path] = set()
    for number, (run, updates, micro_steps) in enumerate(saves):
        path = folder / folder_name(updates, micro_steps)
        checkpoint(updates, run, micro_steps, numbers=1).packed().write(path)
        keep |= {path} if number in best else set()
        gone = rotate(folder, path, limit, keep)
        assert not keep.intersection(gone) and all(kept.is_dir() for kept in keep)
        assert is_whole(read_checkpoint(path))
        if number in broken:  # later, by the disk
            name = "manifest.json" if number % 2 else "model.safetensors"
            (path / name).write_bytes((path / name).read_bytes()[:-9])
    shutil.rmtree(folder)
