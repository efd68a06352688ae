"""The graph cache: graphs of steps on disk, by all that decides them.

Captures are kept by other keys (capture_cache.py). What a verb of `Compiler` makes of a graph is
read instead of made again where a file has it (cache_files.py):

    key = SHA-256 of: the graph given, bit by bit; the verb with its arguments (the recipe, the
          outputs); passes switched off; the cast policy; the mesh; every op, rule, pass and kernel
          by name; versions of Onward (and its sources), torch, onnx, onnx_ir, numpy and Python; the
          target, the kernel library's bytes, BLAS engines, threads, processor

Where something else could have a say nothing is kept: code of other packages in the tables, checks
and dumps of each pass, sources that changed since they were loaded.
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

Argument: TypeAlias = "Recipe | Sequence[str] | bool"  # what decides a verb's result, by its values
Result: TypeAlias = "Graph | PackedForward | None"  # None: the verb left the graph as it was
R = TypeVar("R", bound=Result)


@dataclass(frozen=True)
class CacheEntry:
    """What a verb made, and its passes' reports."""

    made: Result
    reports: list[PassReport]


class GraphCache:
    """The graphs that a compiler's verbs make, kept for runs to come.

    target, disable, policy, mesh: the compiler's settings, which are in every key. journal: of the
    compilation, which has the reports of what is read as it has those of what is made.
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
        """What `make` returns for this verb of a graph, read where a run before has kept it, else
        made and kept.

        arguments: everything but the graph and the compiler's settings that decides the result.
        `make` depends on nothing else, and leaves its reports in the journal.
        """
        if not environment().graph_cache or self._journal.looks_at_passes:
            return make()
        with self._journal.timed("graph cache"):
            key = self._key(verb, graph, arguments)
            found = None if key is None else read(key)
        if found is not None:
            self._journal.reports += found.reports
            log.debug("%s: read from the cache", verb)
            return cast("R", found.made)  # the verb is in the key
        before = len(self._journal.reports)
        made = make()
        if key is not None:
            with self._journal.timed("graph cache"):
                write(key, CacheEntry(made, self._journal.reports[before:]))
        return made

    def _key(self, verb: str, graph: Graph, arguments: Sequence[Argument]) -> str | None:
        """None where not all that decides the result can be named."""
        try:
            settings = [sorted(self._disable), self._policy, self._mesh]
            what = [verb, digest(graph), arguments, settings, _world(self._target)]
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


# ---- entries as bytes


def read(key: str) -> CacheEntry | None:
    """What is kept under a key; None where nothing is, or nothing whole."""
    return cache_files.read(key, _unpacked)


def write(key: str, entry: CacheEntry) -> None:
    """Keeps it, where that can be had: not a line of a step depends on it."""
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
    """Raises ArchiveError for other bytes than `_packed` gives."""
    length = 8 + int.from_bytes(body[:8], "little")
    try:
        head = json.loads(body[8:length])
        if head["key"] != key:
            raise ArchiveError("another key")
        reports = [_report(item) for item in head["reports"]]
        made: Result = from_bytes(body[length:]) if head["graph"] else None
        if made is not None and head["reads"] is not None:
            made = PackedForward(made, {str(k): str(v) for k, v in head["reads"].items()})
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise ArchiveError(str(error)) from error
    return CacheEntry(made, reports)


def _report(item: dict[str, Any]) -> PassReport:
    made = PassReport(**item)
    return replace(made, misses=tuple(NearMiss(**m) for m in item["misses"]))
