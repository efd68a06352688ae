"""How it is timed: one process per engine, engines in turn, distinct batches, losses compared.

Every worker imports the same libraries before its memory base is read, so that no engine is
charged for an import which another one was spared. All times are seconds, all sizes bytes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workloads import MODELS, Batch, Case, make_batches, make_model

if TYPE_CHECKING:
    from torch import nn

LEARNING_RATE = 5e-5


@dataclass(frozen=True)
class Engine:
    """One way to run a step. `compiled`: under torch.compile; `fused`: one-kernel AdamW.

    disable, seed: Onward's options of these names; a seed makes dropout the same in every run.
    change: the model that is trained instead, made of the case's own; a function of a module.
    """

    name: str
    about: str
    compiled: bool = False
    fused: bool = False
    onward: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    disable: tuple[str, ...] = ()
    seed: int | None = None
    change: Callable[[nn.Module], nn.Module] | None = None


# Fewer page faults: torch then asks for large allocations in huge pages.
_LARGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}

ENGINES = {
    engine.name: engine
    for engine in (
        Engine("eager", "PyTorch as it comes"),
        Engine(
            "eager-tuned",
            "eager, THP_MEM_ALLOC_ENABLE=1, fused AdamW",
            fused=True,
            env=_LARGE_PAGES,
        ),
        Engine("compile", "torch.compile(model)", compiled=True),
        Engine(
            "compile-tuned",
            "torch.compile(model), THP_MEM_ALLOC_ENABLE=1, fused AdamW",
            compiled=True,
            fused=True,
            env=_LARGE_PAGES,
        ),
        Engine("onward", "onward.Trainer", onward=True),
    )
}


class Memory:
    """Peak memory of this process on the CPU, or of the allocator on a GPU, in bytes."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.resettable = True
        self._status = Path("/proc/self/status")

    def _read(self, key: str) -> int:
        for line in self._status.read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
        raise KeyError(key)

    def resident(self) -> int:
        """The resident set, freed heap included."""
        return self._read("VmRSS")

    def now(self) -> int:
        """Memory in use: resident set, or live tensors on the GPU."""
        import torch

        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            return torch.cuda.memory_allocated()
        with contextlib.suppress(AttributeError):  # not glibc
            # Freed heap would serve the first tensors unseen, and hide them from the peak.
            ctypes.CDLL(None).malloc_trim(0)
        return self.resident()

    def reset_peak(self) -> None:
        """Start a new peak; where the kernel refuses, peaks cover the process's whole life."""
        import torch

        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")
        except OSError:
            self.resettable = False

    def peak(self) -> int:
        """The highest use since the last reset."""
        import torch

        if self.device == "cuda":
            return torch.cuda.max_memory_allocated()
        return self._read("VmHWM")


def _import_everything() -> dict[str, str]:
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


class Session:
    """A model and its step under one engine; lives in the process that is measured."""

    def __init__(self, engine: Engine, case: Case, device: str, batch_count: int) -> None:
        import torch

        torch.set_float32_matmul_precision("high" if case.precision == "tf32" else "highest")
        if device == "cuda":
            torch.backends.cudnn.allow_tf32 = case.precision == "tf32"
        self.engine, self.case, self.device = engine, case, device
        self.batches: list[Batch] = []
        self.feed(case, batch_count)
        self.model = make_model(case).to(device)
        if engine.change is not None:
            self.model = engine.change(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, fused=engine.fused or None
        )
        self.trainer: Any = None
        self.forward: Callable[..., Any] = self.model

    def feed(self, case: Case, batch_count: int) -> None:
        """Take this case's batches from now on."""
        self.batches = [
            {name: value.to(self.device) for name, value in batch.items()}
            for batch in make_batches(case, batch_count)
        ]

    def attach(self) -> None:
        """Hand the model to the engine: what this costs belongs to its first step."""
        import torch

        if self.engine.onward:
            import onward

            extra: dict[str, Any] = {}
            if self.case.precision == "bf16":
                extra["mixed_precision"] = "bf16"
            # Any: a version without the option says so in its row of the table.
            make_options: Any = onward.TrainerOptions
            options = make_options(disable=self.engine.disable, seed=self.engine.seed, **extra)
            self.trainer = onward.Trainer(self.model, self.optimizer, options=options)
        if self.engine.compiled:
            torch._dynamo.reset()
            self.forward = torch.compile(self.model)

    def step(self, batch: Batch) -> Any:
        """One training step; returns the loss, still on its device."""
        import torch

        if self.trainer is not None:
            return self.trainer.train_step(**batch).loss
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.case.precision == "bf16"):
            output = self.forward(**batch)
        loss = output if isinstance(output, torch.Tensor) else output["loss"]
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def sync(self) -> None:
        """Wait for the device."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()

    def timed(self, start: int, count: int) -> dict[str, Any]:
        """Steps `start` .. `start + count`: the CPU times each, a GPU the whole block."""
        losses, seconds = [], []
        self.sync()
        block = time.perf_counter()
        for batch in self.batches[start : start + count]:
            begin = time.perf_counter()
            losses.append(self.step(batch))
            if self.device == "cpu":
                losses[-1] = float(losses[-1])
                seconds.append(time.perf_counter() - begin)
        self.sync()
        if self.device != "cpu":  # a wait in every step would hide how launches overlap
            seconds = [(time.perf_counter() - block) / count] * count
        return {"seconds": seconds, "losses": [float(loss) for loss in losses]}

    def report(self) -> dict[str, Any]:
        """What the trainer itself says; empty for the other engines."""
        if self.trainer is None:
            return {}
        from onward.kernels.native.library import library
        from onward.plan import Region

        said = dict(self.trainer.report())
        found = library()
        return {
            "compile_seconds": said.get("compile_seconds"),
            "predicted_peak_bytes": said.get("predicted_peak_bytes"),
            "launches": said.get("launches"),
            "pass_edits": _edits(said.get("passes") or []),
            "native": "none" if found is None else found.level,
            "arena_bytes": sum(self.trainer.memory.arena_bytes(region) for region in Region),
        }


def _edits(passes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Edits by pass; one that is in both lists is summed, as one name switches it off."""
    total: dict[str, int] = {}
    for item in passes:
        total[item["name"]] = total.get(item["name"], 0) + item["edits"]
    return total


class _Worker:
    """The far side of the pipe: one engine, one case at a time."""

    def __init__(self, engine: Engine, device: str, threads: int) -> None:
        import torch

        if threads:
            torch.set_num_threads(threads)
        self.engine, self.device = engine, device
        self.missing = _import_everything()
        self.memory = Memory(device)
        self.session: Session | None = None
        self.base = 0

    def prepare(self, case: Case, batch_count: int, keep: bool = False) -> dict[str, Any]:
        """Build the model, then take the first step: capture and compilation included.

        keep: go on with the model that is there, if any, on the batches of this case.
        """
        if self.engine.onward and "onward" in self.missing:
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

    def run(self, start: int, count: int) -> dict[str, Any]:
        """Timed steps, and the peak of everything since the first step."""
        assert self.session is not None
        result = self.session.timed(start, count)
        return {**result, "peak_step_bytes": self.memory.peak() - self.base}

    def look(self) -> dict[str, Any]:
        """Memory in use since before the first step, and what the trainer says by now."""
        assert self.session is not None
        return {"resident_bytes": self.memory.resident() - self.base, **self.session.report()}

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


def _serve(connection: Connection, engine: Engine, device: str, threads: int) -> None:
    worker = _Worker(engine, device, threads)
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


class EngineError(RuntimeError):
    """An engine could not do what it was asked to; the message says why."""


class Remote:
    """The near side: starts an engine's process and asks it for one thing at a time."""

    def __init__(self, engine: Engine, device: str, threads: int = 0) -> None:
        self.engine = engine
        # A cache of its own, empty: the first step is a cold one for every engine.
        self._cache = tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True)
        context = multiprocessing.get_context("spawn")
        self._connection, far = context.Pipe()
        self._process = context.Process(target=_serve, args=(far, engine, device, threads))
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
                raise EngineError(f"no answer within {timeout:.0f} s")
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
def _environment(extra: Mapping[str, str]):
    """Variables for a process that is started inside the block."""
    before = dict(os.environ)
    os.environ.update(extra)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass(frozen=True)
class Effort:
    """How much to measure: `rounds` turns of `steps` timed steps after `warmup` untimed ones.

    exact_tolerance: of a loss without dropout, in nats; a share of the loss where `relative`.
    alternate: every other round goes through the engines backwards.
    keep: the engines keep their models, for a next case which differs in its batches only.
    """

    rounds: int
    steps: int
    warmup: int
    exact_steps: int  # without dropout, compared step by step; 0 leaves the check out
    level_tolerance: float  # of the mean loss, with dropout on
    exact_tolerance: float = 1e-3
    relative: bool = False
    alternate: bool = False
    keep: bool = False

    @property
    def batches(self) -> int:
        """Distinct batches an engine sees: one for the first step, then warm-up and rounds."""
        return 1 + self.warmup + self.rounds * self.steps


def measure(
    case: Case, remotes: Mapping[str, Remote], effort: Effort, seconds_left: Callable[[], float]
) -> dict[str, Any]:
    """One case under every engine, in turn. An engine that fails is recorded and left out.

    A round that would not end in time is not begun: `rounds` of the result says how many were done.
    """
    results: dict[str, dict[str, Any]] = {}
    running: list[str] = []
    for remote in remotes.values():
        remote.wait()
    for name, remote in remotes.items():
        say(f"{case.name}: {name}: first step")
        entry = results[name] = {"about": remote.engine.about, "seconds": [], "losses": []}
        with _recorded(entry):
            arguments = (case, effort.batches, effort.keep)
            entry |= remote.ask("prepare", *arguments, timeout=seconds_left())
            remote.ask("run", 1, effort.warmup, timeout=seconds_left())
            running.append(name)
    done, longest = 0, 0.0
    while done < effort.rounds and (not done or longest < seconds_left()):
        begin, turn, said = time.monotonic(), done, list[str]()
        for name in running[:: -1 if effort.alternate and turn % 2 else 1]:
            entry = results[name]
            time.sleep(0.2)  # the previous engine's threads stop spinning
            answer: dict[str, Any] = {}
            with _recorded(entry):
                start = 1 + effort.warmup + turn * effort.steps
                answer = remotes[name].ask("run", start, effort.steps, timeout=seconds_left())
                entry["seconds"].append(answer["seconds"])
                entry["losses"] += answer["losses"]
                entry["peak_step_bytes"] = answer["peak_step_bytes"]
                said.append(f"{name} {1e3 * statistics.median(answer['seconds']):.0f}")
            if not answer:
                running.remove(name)
        done, longest = done + 1, max(longest, time.monotonic() - begin)
        say(f"{case.name}: round {done} of {effort.rounds}, ms: {', '.join(said)}")
    exact: dict[str, list[float]] = {}
    for name in running if effort.exact_steps else []:
        with _recorded(results[name]):
            answer = remotes[name].ask("exact", case, effort.exact_steps, timeout=seconds_left())
            exact[name] = answer["losses"]
    for remote in remotes.values():
        if remote.alive and not effort.keep:
            with contextlib.suppress(EngineError):
                remote.ask("release", timeout=60.0)
    for entry in results.values():
        _summarise(entry, case)
    checks = _check_losses(results, exact, effort)
    return {
        "case": asdict(case) | {"about": MODELS[case.model].about},
        "rounds": done,
        "engines": results,
        "checks": checks,
    }


@contextlib.contextmanager
def _recorded(entry: dict[str, Any]):
    """An engine's failure becomes a line of the table, not the end of the run."""
    try:
        yield
    except EngineError as error:
        entry["error"] = str(error)


def _summarise(entry: dict[str, Any], case: Case) -> None:
    flat = [seconds for turn in entry["seconds"] for seconds in turn]
    if not flat:
        return
    entry["step_s"] = statistics.median(flat)
    rounds = [statistics.median(turn) for turn in entry["seconds"]]
    entry["round_s_min"], entry["round_s_max"] = min(rounds), max(rounds)
    entry["tokens_per_s"] = case.tokens_per_step / entry["step_s"]


def _check_losses(
    results: Mapping[str, dict[str, Any]], exact: Mapping[str, list[float]], effort: Effort
) -> dict[str, Any]:
    """Against eager: the level with dropout on, and each step without."""
    checks: dict[str, Any] = {
        "level_tolerance": effort.level_tolerance, "exact_tolerance": effort.exact_tolerance,
        "relative": effort.relative,
    }  # fmt: skip
    level: dict[str, float] = {}
    want = results.get("eager", {}).get("losses")
    for name, entry in results.items():
        if want and len(entry["losses"]) == len(want):
            mean = statistics.fmean(want)
            level[name] = abs(statistics.fmean(entry["losses"]) - mean) / abs(mean)
    steps: dict[str, float] = {}
    for name, losses in exact.items():
        if "eager" in exact:
            differences = [
                abs(a - b) / (abs(b) if effort.relative else 1.0)
                for a, b in zip(losses, exact["eager"], strict=True)
            ]
            steps[name] = max(differences)
    checks["level_difference"], checks["exact_difference"] = level, steps
    # A NaN is not below any tolerance, so that it fails here.
    checks["passed"] = all(value <= effort.level_tolerance for value in level.values()) and all(
        value <= effort.exact_tolerance for value in steps.values()
    )
    return checks


def say(text: str) -> None:
    """Progress, at once, on stdout."""
    print(text, flush=True)
