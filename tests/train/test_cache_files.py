"""Files of the caches: whole or not there, whatever a disk or another process does."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onward import cache_files, graph_cache
from onward.graph_cache import CacheEntry
from onward.rewrite import PassReport


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("ONWARD_CACHE", str(tmp_path))
    return tmp_path / "graphs"


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*")) if folder.exists() else []


def keys(folder: Path) -> set[str]:
    return {path.name for path in files(folder)}


def entry() -> CacheEntry:
    return CacheEntry(None, [PassReport("noop", 3, 0.0, 12)])


KEY = "0" * 64


@pytest.fixture
def whole(folder: Path) -> Path:
    graph_cache.write(KEY, entry())
    assert graph_cache.read(KEY) == entry()
    return folder / f"{KEY}.graph"


def replaced(data: bytes, at: int, by: int) -> bytes:
    return data[:at] + bytes([data[at] ^ by]) + data[at + 1 :]


def test_a_file_with_any_bit_or_byte_other_than_written_is_not_there(whole: Path) -> None:
    data = whole.read_bytes()
    broken = [data[:n] for n in range(len(data))] + [data + b"\0", b"\0" * len(data), data * 2]
    broken += [replaced(data, i, 1 << (i % 8)) for i in range(len(data))]
    draw = random.Random(1)
    broken += [draw.randbytes(len(data)) for _ in range(20)]
    for other in broken:
        whole.write_bytes(other)
        assert graph_cache.read(KEY) is None
    whole.write_bytes(data)
    assert graph_cache.read(KEY) == entry()


def test_a_file_under_anothers_name_is_not_there(whole: Path) -> None:
    other = "1" * 64
    whole.rename(whole.with_name(f"{other}.graph"))
    assert graph_cache.read(other) is None and graph_cache.read(KEY) is None


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def unreadable(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.parent / "nowhere")


def too_large(path: Path) -> None:
    with path.open("ab") as file:
        file.truncate(cache_files.LARGEST + 1)


@pytest.mark.parametrize("spoil", [as_folder, as_pipe, unreadable, too_large])
def test_what_is_no_file_of_ours_neither_stops_nor_serves_a_step(
    spoil: Callable[[Path], None], whole: Path
) -> None:
    spoil(whole)
    assert graph_cache.read(KEY) is None
    graph_cache.write(KEY, entry())
    assert graph_cache.read(KEY) in (None, entry())


@pytest.mark.parametrize(
    "error", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO, errno.EDQUOT, errno.EMFILE]
)
@pytest.mark.parametrize("at", ["mkdir", "mkstemp", "fdopen", "replace"])
def test_no_error_of_a_disk_reaches_a_step(
    at: str, error: int, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    def fails(*args: Any, **kwargs: Any) -> Any:
        raise OSError(error, os.strerror(error))

    place = {"mkdir": Path, "mkstemp": cache_files.tempfile, "fdopen": os, "replace": Path}[at]
    with monkeypatch.context() as patch:
        patch.setattr(place, at, fails)
        graph_cache.write(KEY, entry())
    assert graph_cache.read(KEY) is None
    assert not [path for path in files(folder) if path.suffix != ".part"]


def test_a_disk_that_fills_while_writing_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    real = os.fdopen

    def full(handle: int, mode: str) -> Any:
        file = real(handle, mode)

        class Full:
            def __enter__(self) -> Any:
                return self

            def __exit__(self, *error: Any) -> None:
                file.close()

            def write(self, data: bytes) -> None:
                file.write(data[:100])
                raise OSError(errno.ENOSPC, "No space left on device")

        return Full()

    monkeypatch.setattr(os, "fdopen", full)
    graph_cache.write(KEY, entry())
    assert files(folder) == [] and graph_cache.read(KEY) is None


def test_files_read_longest_ago_go_first_and_half_written_ones_in_the_end(folder: Path) -> None:
    names = [f"{i:064d}" for i in range(6)]
    for i, key in enumerate(names):
        graph_cache.write(key, entry())
        os.utime(folder / f"{key}.graph", (1000 + i, 1000 + i))
    assert graph_cache.read(names[0])  # now the last that was read
    (folder / ".old.part").write_bytes(b"x")
    os.utime(folder / ".old.part", (1000, 1000))
    (folder / ".new.part").write_bytes(b"x")
    (folder / "notes.txt").write_bytes(b"the user's own")
    count, total = cache_files.size()
    each = (total - 2) // 6
    assert count == 8
    cache_files.prune(3 * each + each // 2)
    assert keys(folder) == {f"{n}.graph" for n in (names[0], *names[4:])} | {
        ".new.part", "notes.txt",
    }  # fmt: skip
    cache_files.clear()
    assert keys(folder) == {".new.part", "notes.txt"}


def test_the_size_is_bounded_as_files_are_written(
    monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    graph_cache.write(KEY, entry())
    each = cache_files.size()[1]
    monkeypatch.setattr(cache_files, "MOST_BYTES", 3 * each)
    for i in range(8):
        graph_cache.write(f"{i:064d}", entry())
        assert graph_cache.read(f"{i:064d}")
        assert cache_files.size()[1] <= 3 * each


WRITER = """
import sys
from onward import cache_files, graph_cache
from onward.graph_cache import CacheEntry
from onward.rewrite import PassReport
keys = [f"{i:064d}" for i in range(5)]
for turn in range(150):
    key = keys[turn % 5]
    want = CacheEntry(None, [PassReport("noop", i, 0.0, 12) for i in range(turn % 5 + 1)])
    graph_cache.write(key, want)
    found = graph_cache.read(key)
    assert found in (None, want), found
    if turn % 40 == int(sys.argv[1]):
        cache_files.clear()
"""


@pytest.mark.slow
def test_writers_readers_and_clearers_at_once(folder: Path) -> None:
    """Each finds a file whole or not at all."""
    at_work = [subprocess.Popen([sys.executable, "-c", WRITER, str(i)]) for i in range(3)]
    until = time.monotonic() + 200
    while any(p.poll() is None for p in at_work) and time.monotonic() < until:
        for i in range(5):
            found = graph_cache.read(f"{i:064d}")
            assert found is None or len(found.reports) == i + 1
    assert [p.wait(timeout=1) for p in at_work] == [0] * 3
    assert all(path.suffix == ".graph" for path in files(folder))
