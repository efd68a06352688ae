"""The graph cache: graphs of steps on disk, by everything that decides them.

The results of `Compiler`'s methods are read from files (cache_files.py) if an earlier run has
stored them. Captures have other keys (capture_cache.py).

    key = SHA-256 of: the graph given, bit by bit; the method with its arguments (the recipe, the
          outputs); passes switched off; the cast policy; the mesh; every op, rule, pass and kernel
          by name; versions of Onward (and its sources), torch, onnx, onnx_ir, numpy and Python; the
          target, the kernel library's bytes, BLAS engines, threads, processor

Nothing is stored where anything else could affect the result: code of other packages in the tables,
checks and dumps of each pass, sources that changed since they were loaded.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

from onward import cache_files
from onward.differentiate import Recipe
from onward.distribute import Mesh
from onward.environment import environment
from onward.extend import OPTIMIZERS, Optimizer, records
from onward.graph.archive import ArchiveError, digest, from_bytes, to_bytes
from onward.graph.graph import Graph
from onward.journal import Journal
from onward.kernels import Target
from onward.kernels.fingerprint import fingerprint
from onward.rewrite import NearMiss, PackedForward, PassReport, Policy

log = logging.getLogger("onward")

_PACKAGE = Path(__file__).parent
_LOADED = time.time()

# arguments that decide a method's result, by value
Argument: TypeAlias = "Recipe | Sequence[str] | bool"
Result: TypeAlias = "Graph | PackedForward | None"  # None: the method left the graph as it was
R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class CacheEntry:
    """The result of a Compiler method, and the reports of its passes."""

    made: Result
    reports: list[PassReport]


class GraphCache:
    """Stores the graphs that a compiler's methods make, for later runs.

    target, disable, policy, mesh: the compiler's settings, part of every key. journal: of the
    compilation; it gets the reports of graphs that are read, as of those that are made.
    """

    def __init__(
        self,
        target: Target,
        disable: set[str],
        policy: Policy | None,
        mesh: Mesh,
        journal: Journal,
    ) -> None:
        self._target, self._disable = target, disable
        self._policy, self._mesh = policy, mesh
        self._journal = journal

    def get_or_make(
        self, verb: str, graph: Graph, arguments: Sequence[Argument], make: Callable[[], R]
    ) -> R:
        """Returns the result of `make` for this method and graph: read from disk if an earlier run
        has stored it, else made and stored.

        arguments: all that decides the result, besides the graph and the compiler's settings.
        `make` must depend on nothing else; it leaves its reports in the journal.
        """
        if not environment().graph_cache or self._journal.looks_at_passes:
            return make()
        with self._journal.timed("graph cache"):
            key = self._key(verb, graph, arguments)
            found = None if key is None else read(key)
        if found is not None:
            self._journal.reports += found.reports
            log.debug("%s: read from the cache", verb)
            return cast("R", found.made)  # the key includes the method
        before = len(self._journal.reports)
        made = make()
        if key is not None:
            with self._journal.timed("graph cache"):
                write(key, CacheEntry(made, self._journal.reports[before:]))
        return made

    def _key(self, verb: str, graph: Graph, arguments: Sequence[Argument]) -> str | None:
        """The key of a result; None where something that decides it cannot be identified."""
        try:
            settings = [sorted(self._disable), self._policy, self._mesh]
            what = [verb, digest(graph), arguments, settings, _world(self._target)]
            return hashlib.sha256(json.dumps(what, default=_plain).encode()).hexdigest()
        except (ArchiveError, TypeError, OSError) as error:
            log.debug("%s is not kept: %s", verb, error)
            return None


def _world(target: Target) -> list[Any]:
    """The part of a key that is the same for the whole process. Raises TypeError where code of
    other packages is registered."""
    held = registered()
    return [held, sources(), _versions(), fingerprint(target)]


def registered() -> list[tuple[str, str]]:
    """Every record of an op, a translation and the like. Raises TypeError for those of other
    packages."""
    held = sorted(records())
    foreign = [name for name, place in held if not place.startswith(("onward.", "builtins."))]
    if foreign:
        raise TypeError(
            f"another package has registered {', '.join(foreign[:3])}, whose code "
            "the cache does not know"
        )
    return held


def _plain(value: Any) -> Any:
    """One of Onward's records as JSON. Raises TypeError for other values."""
    if isinstance(value, Optimizer):
        if OPTIMIZERS.get(value.name) is not value:
            raise TypeError(f"{value.name} is not the optimizer that is registered")
        return ["optimizer", value.name]
    if not is_dataclass(value) or isinstance(value, type):
        raise TypeError(f"{value!r} has no form on disk")
    return {"": type(value).__name__} | {f.name: getattr(value, f.name) for f in fields(value)}


def versions() -> list[str]:
    """The versions of Python and of the packages, besides torch and numpy, that affect graphs."""
    return _versions()


@functools.cache
def _versions() -> list[str]:
    found = [platform.python_version()]
    for package in ("onward", "onnx", "onnx-ir"):
        try:
            found.append(version(package))
        except PackageNotFoundError:  # sources that are not installed
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
    """A digest of the library's sources. Raises TypeError if they may differ from those that
    run."""
    made, last = _digest_of_sources()
    if last > _LOADED:
        raise TypeError("the library's sources changed after they were loaded")
    return made


# ---- entries as bytes


def read(key: str) -> CacheEntry | None:
    """Reads the entry of a key; None where there is none, or it is damaged."""
    return cache_files.read(key, _unpacked)


def write(key: str, entry: CacheEntry) -> None:
    """Stores an entry if possible; failures are ignored, since no result depends on it."""
    cache_files.write(key, lambda: _packed(key, entry))


def _packed(key: str, entry: CacheEntry) -> bytes:
    reports = [{**asdict(r), "seconds": 0.0} for r in entry.reports]
    made = entry.made
    reads = made.reads if isinstance(made, PackedForward) else None
    graph = made.graph if isinstance(made, PackedForward) else made
    said = {"key": key, "reports": reports, "graph": graph is not None, "reads": reads}
    head = json.dumps(said).encode()
    body = b"" if graph is None else to_bytes(graph)
    return b"".join((len(head).to_bytes(8, "little"), head, body))


def _unpacked(key: str, body: bytes) -> CacheEntry:
    """Parses the bytes of `_packed`. Raises ArchiveError for others."""
    length = 8 + int.from_bytes(body[:8], "little")
    try:
        head = json.loads(body[8:length])
        if head["key"] != key:
            raise ArchiveError("another key")
        reports = [_report(item) for item in head["reports"]]
        made: Result = from_bytes(body[length:]) if head["graph"] else None
        if made is not None and head["reads"] is not None:
            made = PackedForward(made, {str(k): str(v) for k, v in head["reads"].items()})
    except Exception as error:  # any, since a value of any type may stand anywhere
        raise ArchiveError(str(error)) from error
    return CacheEntry(made, reports)


def _report(item: dict[str, Any]) -> PassReport:
    made = PassReport(**item)
    return replace(made, misses=tuple(NearMiss(**m) for m in item["misses"]))
