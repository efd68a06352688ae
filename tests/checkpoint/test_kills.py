"""A process that is killed, a machine that loses power, a disk that fails: a whole checkpoint is
found, and the next save goes on from there."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_faults import PowerLoss, calls_of, checkpoint, is_whole, killed_at, watching

from onward.checkpoint import (
    StagedFiles,
    checkpoints,
    read_checkpoint,
    remove_unpublished,
    rotate,
    rotation,
)
from onward.train.checkpointing import read_newest

Save = Callable[[Path], None]


def after_one(folder: Path) -> None:
    """The second checkpoint of a run that keeps one."""
    path = folder / "checkpoint-2"
    checkpoint(2).packed().write(path)
    rotate(folder, path, 1)


def again(folder: Path) -> None:
    """A checkpoint in the place of one that is there."""
    checkpoint(1).packed().write(folder / "checkpoint-1")


SAVES: dict[str, Save] = {"after one": after_one, "again": again}


def begun(folder: Path) -> Path:
    """A folder with a checkpoint."""
    checkpoint(1).packed().write(folder / "checkpoint-1")
    return folder


def is_sound(folder: Path) -> bool:
    """Whether the newest checkpoint that is found is whole, and a save after it leaves one."""
    path, found = read_newest(folder, strict=True)
    sound = is_whole(found) and found.facts["updates"] in (1, 2)
    last = folder / "checkpoint-3"
    checkpoint(3).packed().write(last)
    rotate(folder, last, 1)
    return (
        sound and [p.name for p in folder.iterdir()] == ["checkpoint-3"] and path.parent == folder
    )


@pytest.mark.slow
@pytest.mark.parametrize("save", SAVES)
def test_killed_at_every_call(save: str, tmp_path: Path) -> None:
    count = calls_of(lambda: SAVES[save](begun(tmp_path / "whole")))
    assert count > 15  # each file is opened, written and synced
    for number in range(count + 1):
        folder = begun(tmp_path / str(number))
        killed_at(number, lambda folder=folder: SAVES[save](folder))
        assert is_sound(folder), f"killed before call {number}"


@pytest.mark.parametrize("save", SAVES)
def test_without_power_at_every_moment(
    save: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "_is_alive", lambda pid: False)  # whose power it was
    folder = begun(tmp_path / "run")
    before = shutil.copytree(folder, tmp_path / "before")
    disk = PowerLoss(folder)
    with disk.recording():
        SAVES[save](folder)
    states = list(disk.states(before, tmp_path / "states"))
    assert len(states) > 30
    for state in states:
        assert is_sound(state), state.name


def test_a_file_that_is_not_synced_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of a power loss can fail: without fsync it finds what is lost."""
    folder = begun(tmp_path / "run")
    before = shutil.copytree(folder, tmp_path / "before")
    monkeypatch.setattr(rotation, "_is_alive", lambda pid: False)
    disk = PowerLoss(folder)
    with disk.recording():
        again(folder)
    disk.log = [entry for entry in disk.log if entry[0] != "fsync"]
    lost = 0
    for state in disk.states(before, tmp_path / "states"):
        try:
            lost += not is_whole(read_newest(state, strict=False)[1])
        except ValueError:
            lost += 1
    assert lost


@pytest.mark.sample(3)
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT], ids=errno.errorcode.get)
@pytest.mark.parametrize("call", ["open", "write", "fsync", "mkdir", "rename"])
def test_a_disk_that_fails(call: str, number: int, tmp_path: Path) -> None:
    """The error is raised as it is, the checkpoints before stay, and nothing else is left."""
    whole = begun(tmp_path / "whole")
    times = 0

    def count(name: str, args: tuple[Any, ...]) -> None:
        nonlocal times
        times += name == call

    with watching(count):
        after_one(whole)
    for failing in range(times):
        folder, made = begun(tmp_path / f"{failing}"), 0

        def fail(name: str, args: tuple[Any, ...], failing: int = failing) -> None:
            nonlocal made
            made += name == call
            if name == call and made == failing + 1:
                raise OSError(number, os.strerror(number))

        with watching(fail):
            try:
                after_one(folder)
            except OSError as error:
                assert error.errno == number
        found = checkpoints(folder)
        assert found
        assert all(is_whole(read_checkpoint(each.path)) for each in found)
        assert {p.name for p in folder.iterdir()} == {each.path.name for each in found}


def published(folder: Path, number: int) -> None:
    """Two files with a number in them."""
    with StagedFiles(folder) as staged:
        for name in ("a.txt", "b.txt"):
            handle = os.open(staged.path / name, os.O_WRONLY | os.O_CREAT, 0o644)
            os.write(handle, str(number).encode() * 1000)
            os.close(handle)
        staged.publish()


@pytest.mark.parametrize("loss", ["kill", "power"])
def test_files_that_are_published_are_whole(loss: str, tmp_path: Path) -> None:
    """Whenever a process is killed or the power goes, each file is the one before or the new one,
    and the last by name is the first to be new."""
    folder = tmp_path / "run"
    folder.mkdir()
    published(folder, 1)
    states: list[Path] = []
    if loss == "kill":
        for number in range(calls_of(lambda: published(tmp_path, 2)) + 1):
            states.append(shutil.copytree(folder, tmp_path / str(number)))
            killed_at(number, lambda: published(states[-1], 2))
    else:
        before = shutil.copytree(folder, tmp_path / "before")
        disk = PowerLoss(folder)
        with disk.recording():
            published(folder, 2)
        states += disk.states(before, tmp_path / "states")
    found = []
    for state in states:
        remove_unpublished(state)
        texts = {path.name: path.read_text() for path in state.iterdir()}
        assert set(texts) == {"a.txt", "b.txt"}
        assert all(text in ("1" * 1000, "2" * 1000) for text in texts.values())
        found.append((texts["a.txt"][0], texts["b.txt"][0]))
    assert set(found) == {("1", "1"), ("1", "2"), ("2", "2")}


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """A process that saves in a loop and is killed at moments that nothing chooses."""
    folder = begun(tmp_path / "run")
    for moment in range(12):
        child = os.fork()
        if child == 0:
            try:
                while True:
                    path = folder / "checkpoint-2"
                    checkpoint(2, numbers=20_000).packed().write(path)
                    rotate(folder, path, 1)
            finally:
                os._exit(0)
        time.sleep(0.002 * (moment + 1))
        os.kill(child, 9)
        os.waitpid(child, 0)
        assert is_whole(read_newest(folder, strict=True)[1])
