"""The far side: a process that runs one engine, one case at a time.

Every worker imports the same libraries before its memory base is read, so that no engine is
charged for an import which another one was spared. All times are seconds, all sizes bytes.
"""

from __future__ import annotations

import gc
import importlib
import time
import traceback
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from suite.cases import Case
from suite.engines import Engine
from suite.memory import Memory
from suite.session import Session


def import_everything() -> dict[str, str]:
    """Import what any engine needs; returns what is missing, with the reason."""
    missing = {}
    for name in (
        "transformers", "torch._dynamo", "torch._inductor", "torch.export", "onnx", "onnx_ir",
        "onnxruntime", "onward",
    ):  # fmt: skip
        try:
            importlib.import_module(name)
        except ImportError as error:
            missing[name] = str(error)
    return missing


class Worker:
    """The far side of the pipe: one engine, one case at a time."""

    def __init__(self, engine: Engine, device: str, threads: int) -> None:
        import torch

        if threads:
            torch.set_num_threads(threads)
        self.engine, self.device = engine, device
        self.missing = import_everything()
        self.memory = Memory(device)
        self.session: Session | None = None
        self.base = 0

    def prepare(self, case: Case, batch_count: int, keep: bool = False) -> dict[str, Any]:
        """Build the model, then take the first step: capture and compilation included.

        keep: go on with the model that is there, if any, on the batches of this case.
        """
        if (self.engine.onward or self.engine.module) and "onward" in self.missing:
            raise RuntimeError(f"onward cannot be imported: {self.missing['onward']}")
        session = self.session if keep else None
        fresh = session is None
        if session is None:
            self.session = session = Session(self.engine, case, self.device, batch_count)
            session.sync()
            self.base = self.memory.now()
        else:
            session.feed(case, batch_count)
        self.memory.reset_peak()
        begin = time.perf_counter()
        if fresh:
            session.attach()
        loss = float(session.step(session.batches[0]))
        session.sync()
        seconds = time.perf_counter() - begin
        first_peak = self.memory.peak() - self.base
        self.memory.reset_peak()
        return {
            "first_step_s": seconds,
            "first_loss": loss,
            "first_step_peak_bytes": first_peak,
            "peak_resettable": self.memory.resettable,
            **session.report(),
        }

    def warm_up(self, start: int, count: int) -> dict[str, Any]:
        """Steps that are not timed, and whose memory is not counted."""
        result = self.run(start, count)
        self.memory.reset_peak()
        return result

    def run(self, start: int, count: int) -> dict[str, Any]:
        """Timed steps, and the peak of everything since the warm-up."""
        assert self.session is not None
        result = self.session.timed(start, count)
        return {**result, "peak_step_bytes": self.memory.peak() - self.base}

    def look(self) -> dict[str, Any]:
        """Memory in use since before the first step, and what the trainer says by now."""
        assert self.session is not None
        return {"resident_bytes": self.memory.resident() - self.base, **self.session.report()}

    def slowest(self, most: int) -> dict[str, Any]:
        """The slowest launches of a step; of Onward's engine alone."""
        assert self.session is not None
        return {"slowest": self.session.slowest(most)}

    def exact(self, case: Case, steps: int) -> dict[str, Any]:
        """The losses of a fresh model without dropout."""
        self.release()
        self.session = Session(self.engine, replace(case, dropout=0.0), self.device, steps)
        self.session.attach()
        return {"losses": self.session.timed(0, steps)["losses"]}

    def release(self) -> dict[str, Any]:
        """Drop the model and give its memory back."""
        import torch

        self.session = None
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return {}


def serve(connection: Connection, engine: Engine, device: str, threads: int) -> None:
    """Answer what comes through the pipe until it says stop."""
    worker = Worker(engine, device, threads)
    connection.send({"missing": worker.missing})
    while True:
        command, arguments = connection.recv()
        if command == "stop":
            return
        try:
            connection.send(getattr(worker, command)(*arguments))
        except Exception as error:
            last = traceback.format_exc(limit=-3)
            worker.release()
            connection.send({"error": f"{type(error).__name__}: {error}"[:500], "trace": last})
