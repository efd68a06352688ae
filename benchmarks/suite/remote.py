"""The near side: starts an engine's process and asks it for one thing at a time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from suite.engines import Engine
from suite.worker import serve


class EngineError(RuntimeError):
    """An engine could not do what it was asked to; the message says why."""


class Remote:
    """An engine's process, seen from here."""

    def __init__(self, engine: Engine, device: str, threads: int = 0) -> None:
        self.engine = engine
        # A cache of its own, empty: the first step is a cold one for every engine.
        self._cache = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        context = multiprocessing.get_context("spawn")
        self._connection, far = context.Pipe()
        self._process = context.Process(target=serve, args=(far, engine, device, threads))
        folders = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_CACHE_HOME")
        with _environment({**engine.env, **dict.fromkeys(folders, self._cache.name)}):
            self._process.start()
        far.close()
        self.missing: dict[str, str] | None = None  # what the worker cannot import, once it says so

    def wait(self) -> None:
        """Wait for the worker's imports; those of several workers go on side by side."""
        if self.missing is None:
            try:
                self.missing = self._receive(timeout=300.0)["missing"]
            except EngineError as error:
                self.missing = {"worker": str(error)}

    def ask(self, command: str, *arguments: object, timeout: float = 3600.0) -> dict[str, Any]:
        """Run one command in the worker; raises EngineError on failure, death or timeout."""
        self.wait()
        try:
            self._connection.send((command, arguments))
        except OSError as error:
            why = (self.missing or {}).get("worker", str(error))
            raise EngineError(f"the worker is gone: {why}") from error
        return self._receive(timeout)

    def _receive(self, timeout: float) -> dict[str, Any]:
        try:
            if not self._connection.poll(max(timeout, 0.0)):
                self.close(wait=0.0)
                left = f"no answer within {timeout:.0f} s" if timeout > 1.0 else "out of time"
                raise EngineError(left)
            answer = self._connection.recv()
        except (EOFError, ConnectionError) as error:
            self._process.join(10.0)
            raise EngineError(f"the worker died, exit {self._process.exitcode}") from error
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer

    @property
    def alive(self) -> bool:
        """Whether the worker still answers."""
        return self._process.is_alive()

    def close(self, wait: float = 10.0) -> None:
        """End the worker; one that does not come to an end within `wait` seconds is killed."""
        with contextlib.suppress(OSError):
            self._connection.send(("stop", ()))
        self._process.join(wait)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._cache.cleanup()


@contextlib.contextmanager
def processes(
    engines: Mapping[str, Engine], device: str, threads: int
) -> Iterator[dict[str, Remote]]:
    """A process for each engine, ended with the block."""
    remotes: dict[str, Remote] = {}
    try:
        for name, engine in engines.items():
            remotes[name] = Remote(engine, device, threads)
        yield remotes
    finally:
        for remote in remotes.values():
            remote.close()


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    """Variables for a process that is started inside the block."""
    before = dict(os.environ)
    os.environ.update(extra)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
