"""Onward's column of `benchmarks/reliability.py`, with a few cases of each row: runs that are
killed, damaged, stopped, interrupted and given numbers that are not finite."""

from __future__ import annotations

import contextlib
import math
import os
import random
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_faults import watching

background: Any = import_module("suite.fault_background")
damage: Any = import_module("suite.fault_damage")
interrupts: Any = import_module("suite.fault_interrupts")
kill: Any = import_module("suite.fault_kill")
nan: Any = import_module("suite.fault_nan")
process: Any = import_module("suite.fault_process")
resume: Any = import_module("suite.fault_resume")
systems: Any = import_module("suite.fault_systems")
tables: Any = import_module("suite.fault_table")
progress: Any = import_module("suite.progress")

ONWARD = systems.run_onward
TASK = systems.Task(layers=1)
SECOND = 2 * TASK.save_every * TASK.window  # the micro-batch behind which the second save comes


@pytest.fixture(autouse=True, scope="module")
def prepared(kept_capture: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is captured in this process, and the graphs that are kept on disk, its forks have."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onward.compile.capture", kept_capture)
        patch.setenv("ONWARD_CACHE", str(folder / "cache"))
        patch.setenv("ONWARD_GRAPH_CACHE", "1")
        ONWARD(replace(TASK, updates=1, save_every=0), folder / "run", systems.Watch())
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest that a run which nothing stops ends with."""
    answer = kill.finished(ONWARD, TASK, tmp_path_factory.mktemp("whole")).answer
    assert answer
    return answer


@pytest.fixture(scope="module")
def saved(whole: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two checkpoints."""
    folder = tmp_path_factory.mktemp("saved")
    assert not kill.finished(ONWARD, replace(TASK, keep=2, stop=SECOND), folder).status
    return folder


def in_the_second_save(folder: Path, kill_at: int) -> Any:
    """A run that keeps one checkpoint and is killed before a call, by number, of its second save;
    it returns how many calls it has made there, if it comes to the next step."""
    made, watched = 0, []

    def count(name: str, args: tuple[Any, ...]) -> None:
        nonlocal made
        made += 1
        if made == kill_at:
            os.kill(os.getpid(), 9)

    def save(updates: int) -> None:
        if updates == 2 * TASK.save_every:
            watched.append(watching(count))
            watched[0].__enter__()

    class Saved(Exception):
        pass

    def step(number: int) -> None:
        if watched:
            raise Saved

    def run() -> int:
        with contextlib.suppress(Saved):
            ONWARD(TASK, folder, systems.Watch(step=step, save=save))
        return made

    return process.in_child(run)


@pytest.fixture(scope="module")
def calls(whole: str, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Calls of a save that change the disk."""
    return in_the_second_save(tmp_path_factory.mktemp("counted"), 0).answer


def test_killed_within_a_save(calls: int, whole: str, tmp_path: Path) -> None:
    """About the rename, or while the checkpoint before is removed."""
    ended = in_the_second_save(tmp_path, int(calls * 0.93))
    assert ended.status == -9, ended.said
    assert kill.finished(ONWARD, TASK, tmp_path).answer == whole


def test_killed_at_random_moments(whole: str, tmp_path: Path) -> None:
    """Each of the processes comes further than the one before it, or starts anew."""
    task = replace(TASK, save_every=1, keep=2)
    for moment in (0.6, 1.2):
        child = process.Child(lambda: ONWARD(task, tmp_path / "run", systems.Watch()))
        time.sleep(moment)
        child.kill()
        assert child.wait().status in (0, -9)
    assert kill.finished(ONWARD, task, tmp_path / "run").answer == whole


def test_a_damaged_checkpoint_is_passed_over(saved: Path, whole: str, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    newest = folder / f"checkpoint-{2 * TASK.save_every}"
    older = folder / f"checkpoint-{TASK.save_every}"
    damage.flip(newest / "optimizer.safetensors", older, random.Random(1))
    ended = damage.again(ONWARD, replace(TASK, keep=2), folder)
    assert ended.answer == [whole, TASK.save_every], ended.said


def test_a_whole_checkpoint_is_used(saved: Path, whole: str, tmp_path: Path) -> None:
    folder = shutil.copytree(saved, tmp_path / "run")
    ended = damage.again(ONWARD, replace(TASK, keep=2), folder)
    assert ended.answer == [whole, 2 * TASK.save_every], ended.said


def test_stopped_and_resumed(whole: str, tmp_path: Path) -> None:
    """Within an accumulation window, three times within an epoch, and at its end."""
    kind, task = resume.Kind("here", resume.once), replace(TASK, save_every=0)
    assert resume.chain(ONWARD, task, kind, [3, 8, 12], tmp_path, whole) == tables.GOOD


def test_an_interrupted_update_is_whole(tmp_path: Path) -> None:
    effort = tables.Effort(interrupts=3)
    tally = interrupts.within_updates(effort, ONWARD, tmp_path, progress.Clock(60.0))
    assert (tally.good, tally.tried) == (3, 3), tally


def test_a_batch_that_is_not_finite(tmp_path: Path) -> None:
    """The batch changes nothing, is shown, and is named."""
    at = 3
    ended = process.in_child(lambda: nan.by_onward(nan.Samples(at * nan.ROWS + 1, math.nan), at))
    assert not ended.status, ended.said
    seen = nan.Seen(*ended.answer)
    assert seen.before == seen.after and math.isnan(seen.loss)
    assert f"update {at + 1} " in seen.log and "factor" in seen.log


def test_background_saves_equal_saves_that_wait(tmp_path: Path) -> None:
    torch.manual_seed(0)
    assert process.in_child(lambda: background.equal_saves(tmp_path, 3)).answer[0] == 3
