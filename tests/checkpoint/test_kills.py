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
from onward.checkpoint.disk import StagedFolder
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


Publish = Callable[[Path, int], None]


def published(folder: Path, number: int) -> None:
    """Two files with a number in them."""
    with StagedFiles(folder) as staged:
        two_files(staged.path, number)
        staged.publish()


def published_whole(folder: Path, number: int) -> None:
    """Two files with a number in them, in a folder that takes the place of the one before."""
    with StagedFolder(folder / "step") as staged:
        two_files(staged.path, number)
        staged.publish()


def two_files(folder: Path, number: int) -> None:
    for name in ("a.txt", "b.txt"):
        handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(handle, str(number).encode() * 1000)
        os.close(handle)


def interrupted(publish: Publish, loss: str, tmp_path: Path) -> list[Path]:
    """Folders as they are found where the second of two calls is interrupted, at each moment."""
    folder = tmp_path / "run"
    folder.mkdir()
    publish(folder, 1)
    if loss == "power":
        before = shutil.copytree(folder, tmp_path / "before")
        disk = PowerLoss(folder)
        with disk.recording():
            publish(folder, 2)
        return list(disk.states(before, tmp_path / "states"))
    states: list[Path] = []
    whole = shutil.copytree(folder, tmp_path / "whole")
    for number in range(calls_of(lambda: publish(whole, 2)) + 1):
        states.append(shutil.copytree(folder, tmp_path / str(number)))
        killed_at(number, lambda: publish(states[-1], 2))
    return states


@pytest.mark.parametrize("loss", ["kill", "power"])
def test_files_that_are_published_are_whole(loss: str, tmp_path: Path) -> None:
    """Whenever a process is killed or the power goes, each file is the one before or the new one,
    and the last by name is the first to be new."""
    found = []
    for state in interrupted(published, loss, tmp_path):
        remove_unpublished(state)
        texts = {path.name: path.read_text() for path in state.iterdir()}
        assert set(texts) == {"a.txt", "b.txt"}
        assert all(text in ("1" * 1000, "2" * 1000) for text in texts.values())
        found.append((texts["a.txt"][0], texts["b.txt"][0]))
    assert set(found) == {("1", "1"), ("1", "2"), ("2", "2")}


def number_of(folder: Path) -> str | None:
    """The number in both files of a folder; None where they are not both there, whole and of one
    publication."""
    texts = [path.read_text() for path in sorted(folder.iterdir())]
    return texts[0][0] if texts in (["1" * 1000] * 2, ["2" * 1000] * 2) else None


@pytest.mark.parametrize("loss", ["kill", "power"])
def test_a_folder_that_is_published_is_whole(loss: str, tmp_path: Path) -> None:
    """Whenever a process is killed or the power goes, its files are all those before or all new
    ones; between two renames the one before has another name."""
    found = []
    for state in interrupted(published_whole, loss, tmp_path):
        numbers = {path.name: number_of(path) for path in state.iterdir()}
        assert {"1", "2"} & set(numbers.values())
        found.append(numbers.get("step", "makes way"))
    assert set(found) == {"1", "2", "makes way"}


@pytest.mark.parametrize(
    ("call", "number"), [*(("fsync", n) for n in (1, 2, 3)), ("rename", 1), ("rename", 2)]
)
def test_a_folder_that_cannot_be_published_leaves_the_one_before(
    call: str, number: int, tmp_path: Path
) -> None:
    """Two files and their folder are fsynced; the one before is renamed, then the new one."""
    published_whole(tmp_path, 1)
    made = 0

    def fail(name: str, args: tuple[Any, ...]) -> None:
        nonlocal made
        made += name == call
        if name == call and made == number:
            raise OSError(errno.EIO, "the disk fails")

    with watching(fail), pytest.raises(OSError, match="the disk fails"):
        published_whole(tmp_path, 2)
    assert {path.name: number_of(path) for path in tmp_path.iterdir()} == {"step": "1"}


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
