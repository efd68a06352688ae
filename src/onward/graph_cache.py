"""The graph cache: graphs of steps on disk, by all that decides them.

Captures are kept by other keys (capture_cache.py). What rewriting, row demand
and differentiation make of the captured graph is read instead of made again where a file has it:

    key = SHA-256 of: the graph given, bit by bit; the stage with its arguments (the recipe, the
          outputs); passes switched off; the cast policy; every op, rule, pass and kernel by name;
          versions of Onward (and its sources), torch, onnx, onnx_ir, numpy and Python; the target,
          the kernel library's bytes, BLAS engines, threads, processor

Where something else could have a say nothing is kept: code of other packages in the tables, checks
and dumps of each pass, sources that changed since they were loaded.

A file appears whole or not at all, and is read whole: what its own digest does not vouch for is a
file that is not there. No error of a disk reaches a step. Any number of processes may read, write
and clear at once.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Protocol, TypeVar

from onward.config import environment
from onward.extend import OPTIMIZERS, Optimizer, records
from onward.graph.archive import ArchiveError, digest, from_bytes, to_bytes
from onward.graph.graph import Graph
from onward.journal import Journal
from onward.kernels import Target
from onward.kernels.fingerprint import fingerprint
from onward.rewrite import NearMiss, PassReport, Policy

log = logging.getLogger("onward")

MOST_BYTES = 512 << 20  # of all files; those that were read longest ago go first
LARGEST = 64 << 20  # of one
ABANDONED = 3600.0  # seconds, after which a half written file has no writer any more
_MAGIC = b"onward graph 1\n"
_DIGEST = 32
_SUFFIX = ".graph"
_PACKAGE = Path(__file__).parent
_LOADED = time.time()


class Owner(Protocol):
    """Who makes graphs: for a target, without some passes, in the precision of a policy, by
    verbs of its own."""

    target: Target
    disable: set[str]
    policy: Policy | None
    journal: Journal


C = TypeVar("C", bound=type[Owner])
T = TypeVar("T")


def kept(*verbs: str) -> Callable[[C], C]:
    """A class whose methods of these names read what they would make where it is kept, else keep
    it. Each takes a graph, or what has one, and one argument at most that decides what it makes;
    with more it is called as it stands."""

    def decorate(owner: C) -> C:
        for verb in verbs:
            setattr(owner, verb, _kept(verb, getattr(owner, verb)))
        return owner

    return decorate


def _kept(verb: str, make: Callable[..., Graph | None]) -> Callable[..., Graph | None]:
    @functools.wraps(make)
    def made(self: Owner, given: Any, *arguments: Any, **more: Any) -> Graph | None:
        journal = self.journal
        key = None
        if environment().graph_cache and not journal.looks_at_passes:
            with journal.timed("graph cache"):
                graph = given if isinstance(given, Graph) else given.graph
                said = more or any(isinstance(x, dict) for x in arguments)  # to be filled in
                key = None if said else _key(verb, graph, arguments, self)
                found = None if key is None else read(key)
            if found is not None:
                journal.reports += found.reports
                log.debug("%s: read from the cache", verb)
                return found.graph
        before = len(journal.reports)
        result = make(self, given, *arguments, **more)
        if key is not None:
            with journal.timed("graph cache"):
                write(key, CacheEntry(result, journal.reports[before:]))
        return result

    return made


def _key(verb: str, graph: Graph, arguments: tuple[Any, ...], owner: Owner) -> str | None:
    """None where not all that decides the result can be named."""
    try:
        settings = [sorted(owner.disable), owner.policy]
        what = [verb, digest(graph), arguments, settings, _world(owner.target)]
        return hashlib.sha256(json.dumps(what, default=_plain).encode()).hexdigest()
    except (ArchiveError, TypeError, OSError) as error:
        log.debug("%s is not kept: %s", verb, error)
        return None


def _world(target: Target) -> list[Any]:
    """All that holds for the process. Raises TypeError where others' code has a say."""
    held = registered()
    return [held, sources(), _versions(), fingerprint(target)]


def registered() -> list[tuple[str, str]]:
    """Every record of an op, a translation and the like. Raises TypeError for others' code."""
    held = sorted(records())
    foreign = [name for name, place in held if not place.startswith(("onward.", "builtins."))]
    if foreign:
        raise TypeError(
            f"another package has registered {', '.join(foreign[:3])}, whose code "
            "the cache does not know"
        )
    return held


def _plain(value: Any) -> Any:
    """A record of ours in JSON's terms."""
    if isinstance(value, Optimizer):
        if OPTIMIZERS.get(value.name) is not value:
            raise TypeError(f"{value.name} is not the optimizer that is registered")
        return ["optimizer", value.name]
    if not is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"{value!r} has no form on disk")
    return {"": type(value).__name__} | {f.name: getattr(value, f.name) for f in fields(value)}


def versions() -> list[str]:
    """The versions of Python and of the packages, beside torch and numpy, that make graphs."""
    return _versions()


@functools.cache
def _versions() -> list[str]:
    found = [platform.python_version()]
    for package in ("onward", "onnx", "onnx-ir"):
        try:
            found.append(version(package))
        except PackageNotFoundError:  # of the sources alone
            found.append("")
    return found


@functools.cache
def _digest_of_sources() -> tuple[str, float]:
    made, last = hashlib.sha256(), 0.0
    for path in sorted(_PACKAGE.rglob("*.py")):
        made.update(f"{path.relative_to(_PACKAGE)}\n".encode())
        made.update(path.read_bytes())
        last = max(last, path.stat().st_mtime)
    return made.hexdigest(), last


def sources() -> str:
    """Digest of the library's sources. Raises TypeError where they may not be those that run."""
    made, last = _digest_of_sources()
    if last > _LOADED:
        raise TypeError("the library's sources changed after they were loaded")
    return made


# ---- files


@dataclass(frozen=True)
class CacheEntry:
    """What a stage made, None where it left the graph as it was; and its passes' reports."""

    graph: Graph | None
    reports: list[PassReport]


def folder() -> Path:
    """Where the files are."""
    return environment().cache / "graphs"


def read(key: str) -> CacheEntry | None:
    """What is kept under a key; None where nothing is, or nothing whole."""
    return read_as(key, _unpacked)


def read_as(key: str, unpacked: Callable[[str, bytes], T]) -> T | None:
    """What `unpacked` makes of the bytes that are kept under a key; None where nothing is, nothing
    whole, or where it raises ArchiveError."""
    path = _path(key)
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > LARGEST:
            return None
        data = path.read_bytes()
    except OSError:
        return None
    try:
        entry = unpacked(key, _vouched(data))
    except ArchiveError as error:
        log.info("%s is no graph of ours (%s), and is made again", path.name, error)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # read last now
    return entry


def write(key: str, entry: CacheEntry) -> None:
    """Keeps it, where that can be had: not a line of a step depends on it."""
    write_as(key, lambda: _packed(key, entry))


def write_as(key: str, packed: Callable[[], bytes]) -> None:
    """Keeps the bytes that `packed` makes, where that can be had."""
    try:
        body = packed()
        data = b"".join((_MAGIC, hashlib.sha256(body).digest(), body))
        if len(data) > LARGEST:
            return
        folder().mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder(), prefix=".", suffix=".part")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            Path(name).replace(_path(key))
        except BaseException:
            with contextlib.suppress(OSError):
                Path(name).unlink()
            raise
        prune(MOST_BYTES, keep=key)
    except (OSError, ArchiveError, TypeError) as error:
        _say_once(f"graphs of steps are not kept in {folder()}: {error}")


def size() -> tuple[int, int]:
    """Files, and their bytes."""
    sizes = [found.st_size for _, found in _files()]
    return len(sizes), sum(sizes)


def clear() -> tuple[int, int]:
    """Takes all of them away; how many files and bytes that were."""
    return prune(0)


def prune(most: int, keep: str = "") -> tuple[int, int]:
    """Takes files away, those first that were read longest ago, until at most so many bytes are
    left, and what other processes left half written; how many files and bytes that were."""
    held = sorted(_files(), key=lambda item: item[1].st_mtime)
    total, files, freed = sum(found.st_size for _, found in held), 0, 0
    abandoned = time.time() - ABANDONED
    for path, found in held:
        whole = path.suffix == _SUFFIX
        if path.stem == keep or (not whole and found.st_mtime > abandoned):
            continue
        if whole and total - freed <= most:
            continue
        with contextlib.suppress(OSError):
            path.unlink()
            files, freed = files + 1, freed + found.st_size
    return files, freed


def _files() -> Iterator[tuple[Path, os.stat_result]]:
    try:
        paths = list(folder().iterdir())
    except OSError:
        return
    for path in paths:
        if path.suffix in (_SUFFIX, ".part"):
            with contextlib.suppress(OSError):  # another process took it away
                found = path.stat()
                if stat.S_ISREG(found.st_mode):
                    yield path, found


def _path(key: str) -> Path:
    return folder() / f"{key}{_SUFFIX}"


@functools.cache
def _say_once(text: str) -> None:
    log.info(text)


def _packed(key: str, entry: CacheEntry) -> bytes:
    reports = [{**asdict(r), "seconds": 0.0} for r in entry.reports]
    head = json.dumps({"key": key, "reports": reports, "graph": entry.graph is not None}).encode()
    graph = b"" if entry.graph is None else to_bytes(entry.graph)
    return b"".join((len(head).to_bytes(8, "little"), head, graph))


def _vouched(data: bytes) -> bytes:
    """A file's content. Raises ArchiveError where its digest does not vouch for it."""
    start = len(_MAGIC) + _DIGEST
    body = data[start:]
    if data[: len(_MAGIC)] != _MAGIC or len(body) < 8:
        raise ArchiveError("another format")
    if hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
        raise ArchiveError("its digest is another")
    return body


def _unpacked(key: str, body: bytes) -> CacheEntry:
    """Raises ArchiveError for other bytes than `_packed` gives."""
    length = 8 + int.from_bytes(body[:8], "little")
    try:
        head = json.loads(body[8:length])
        if head["key"] != key:
            raise ArchiveError("another key")
        reports = [_report(item) for item in head["reports"]]
        graph = from_bytes(body[length:]) if head["graph"] else None
    except (LookupError, TypeError, ValueError) as error:
        raise ArchiveError(str(error)) from error
    return CacheEntry(graph, reports)


def _report(item: dict[str, Any]) -> PassReport:
    made = PassReport(**item)
    return replace(made, misses=tuple(NearMiss(**m) for m in item["misses"]))
