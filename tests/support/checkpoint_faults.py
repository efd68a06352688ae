"""Checkpoints of a few numbers, and disks that fail: killed, full, or without power."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onward.checkpoint import Checkpoint, ModelState

# the calls by which a checkpoint changes the disk
CALLS = ("open", "write", "fsync", "mkdir", "rename", "unlink", "rmdir")


def checkpoint(updates: int, run: str = "a", micro_steps: int = 0, numbers: int = 50) -> Checkpoint:
    """A checkpoint of a small layer and some state, whose numbers are `updates`."""
    model = nn.Linear(numbers, 2)
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(updates)
    state = {
        "optimizer": {"exp_avg.weight": torch.full((2, numbers), float(updates))},
        "param_groups": [{"lr": 1e-3, "betas": (0.9, 0.999)}],
        "updates": updates,
    }
    facts = {"run": run, "updates": updates, "micro_steps": micro_steps}
    return Checkpoint(ModelState.of(model), state, facts, {"config.json": "{}\n"})


def is_whole(found: Checkpoint) -> bool:
    """Whether all numbers of a checkpoint that was read are of one and the same save."""
    updates = float(found.facts["updates"])
    tensors = [*found.model.tensors.values(), found.state["optimizer"]["exp_avg.weight"]]
    return found.state["updates"] == updates and all(bool((t == updates).all()) for t in tensors)


@contextmanager
def watching(seen: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
    """Within it `seen` is told of each call that changes the disk, before it happens."""
    patch = pytest.MonkeyPatch()

    def told(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def told_first(*args: Any, **kwargs: Any) -> Any:
            if name != "open" or args[1] & os.O_CREAT:
                seen(name, args)
            return call(*args, **kwargs)

        return told_first

    try:
        for name in CALLS:
            patch.setattr(os, name, told(name, getattr(os, name)))
        yield
    finally:
        patch.undo()


def calls_of(work: Callable[[], Any]) -> int:
    """How many calls that change the disk `work` makes."""
    made: list[str] = []
    with watching(lambda name, args: made.append(name)):
        work()
    return len(made)


def killed_at(number: int, work: Callable[[], Any]) -> None:
    """Runs `work` in a process of its own, which is killed before its call of this number."""
    child = os.fork()
    if child == 0:
        made = 0

        def count(name: str, args: tuple[Any, ...]) -> None:
            nonlocal made
            made += 1
            if made > number:
                os.kill(os.getpid(), 9)

        try:
            with watching(count):
                work()
        finally:
            os._exit(0)
    os.waitpid(child, 0)


class PowerLoss:
    """What a disk would hold if the power went at any moment: of a file that was not fsynced
    nothing, of a name in a folder that was not fsynced the old one or the new one.

    Renamed folders are noted, with what was on the disk before; `states` makes a folder of each.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log: list[tuple[str, tuple[Any, ...]]] = []
        self._paths: dict[int, str] = {}

    @contextmanager
    def recording(self) -> Iterator[None]:
        patch = pytest.MonkeyPatch()
        calls = {name: getattr(os, name) for name in (*CALLS, "close")}

        def opened(path: Any, flags: int, *more: Any, **kwargs: Any) -> int:
            handle = calls["open"](path, flags, *more, **kwargs)
            self._paths[handle] = os.fspath(path)
            if flags & os.O_CREAT:
                self.log.append(("create", (os.fspath(path),)))
            return handle

        def written(handle: int, data: Any) -> int:
            count = calls["write"](handle, data)
            self.log.append(("write", (self._paths.get(handle, ""), bytes(data)[:count])))
            return count

        def synced(handle: int) -> None:
            calls["fsync"](handle)
            self.log.append(("fsync", (self._paths.get(handle, ""),)))

        def made(path: Any, *more: Any, **kwargs: Any) -> None:
            calls["mkdir"](path, *more, **kwargs)
            self.log.append(("mkdir", (os.fspath(path),)))

        def renamed(source: Any, target: Any, **kwargs: Any) -> None:
            calls["rename"](source, target, **kwargs)
            self.log.append(("rename", (os.fspath(source), os.fspath(target))))

        def unlinked(path: Any, **kwargs: Any) -> None:
            calls["unlink"](path, **kwargs)
            if "dir_fd" not in kwargs:  # a manifest, after which the rest of a folder is of no use
                self.log.append(("unlink", (os.fspath(path),)))

        try:
            patch.setattr(os, "unlink", unlinked)
            patch.setattr(os, "open", opened)
            patch.setattr(os, "write", written)
            patch.setattr(os, "fsync", synced)
            patch.setattr(os, "mkdir", made)
            patch.setattr(os, "rename", renamed)
            yield
        finally:
            patch.undo()

    def states(self, before: Path, into: Path) -> Iterator[Path]:
        """Yields a folder as it may be found after a loss of power, for each moment, once with all
        names as they were last and once with those that were fsynced alone. before: a copy of the
        folder from before the recording."""
        for moment in range(len(self.log) + 1):
            for lazy in (False, True):
                place = into / f"{moment}-{lazy}"
                shutil.copytree(before, place)
                self._replay(self.log[:moment], place, lazy)
                yield place

    def _replay(self, log: list[tuple[str, tuple[Any, ...]]], place: Path, lazy: bool) -> None:
        def at(path: str) -> Path:
            return place / Path(path).relative_to(self.folder)

        synced = {args[0] for name, args in log if name == "fsync"}
        contents: dict[str, bytes] = {}
        for number, (name, args) in enumerate(log):
            later = [a[0] for n, a in log[number:] if n == "fsync"]
            if name == "mkdir":
                at(args[0]).mkdir(exist_ok=True)
            elif name == "create":
                contents[args[0]] = b""
                at(args[0]).write_bytes(b"")
            elif name == "write":
                contents[args[0]] += args[1]
                if args[0] in synced:
                    at(args[0]).write_bytes(contents[args[0]])
            elif name == "unlink" and not lazy:
                at(args[0]).unlink()
            elif name == "rename":
                parent = str(Path(args[1]).parent)
                if not lazy or parent in later:
                    at(args[0]).rename(at(args[1]))


__all__ = ["PowerLoss", "calls_of", "checkpoint", "is_whole", "killed_at", "watching"]
