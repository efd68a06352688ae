"""Progress of a run: a bar on a terminal, plain lines elsewhere, and `metrics.jsonl`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import psutil
from tqdm import tqdm

from onward.recipes.stages import Stages

MIB = 1 << 20


def rss_mib() -> float:
    """Present resident memory of the process, MiB."""
    return psutil.Process().memory_info().rss / MIB


def reset_peak_rss() -> None:
    """Resets the peak resident memory where the system allows it (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return


def peak_rss_mib() -> float:
    """Peak resident memory since `reset_peak_rss`, or since the process started; MiB."""
    status = Path("/proc/self/status")
    if status.exists():
        # not ru_maxrss, which starts at the size of the parent process
        for line in status.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    memory = psutil.Process().memory_info()
    if sys.platform == "win32":
        return memory.peak_wset / MIB
    import resource  # not available on Windows, which returned above

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MIB if sys.platform == "darwin" else peak / 1024


@dataclass(frozen=True)
class Metrics:
    """One line of `metrics.jsonl`.

    loss: mean over the updates since the previous line, nats per token. grad_norm: global 2-norm
    before clipping, of the last update; None where not clipped. tokens_per_second, step_ms: over
    the same updates, without the run's first one if possible. rss_mib: present resident memory.
    elapsed_s: since the run's start.
    """

    engine: str
    step: int
    epoch: float
    loss: float
    grad_norm: float | None
    learning_rate: float
    tokens_per_second: float
    step_ms: float
    rss_mib: float
    elapsed_s: float


class Progress:
    """Collects one entry per update, and shows the mean of every `logging_steps` of them."""

    def __init__(
        self,
        engine: str,
        metrics_file: Path,
        total_steps: int,
        steps_per_epoch: int,
        tokens_per_step: int,
        logging_steps: int,
    ) -> None:
        self.engine = engine
        self.total_steps = total_steps
        self.steps_per_epoch = steps_per_epoch
        self.tokens_per_step = tokens_per_step
        self.logging_steps = logging_steps
        self._metrics_file = metrics_file
        self._losses: list[float] = []
        self._started = self._window_started = time.perf_counter()
        self._window_steps = 0
        self._stages = Stages(self._compiling)

    def __enter__(self) -> Progress:
        self._stream = self._metrics_file.open("w", encoding="utf-8")
        self._bar = (
            tqdm(total=self.total_steps, desc=self.engine, unit="step", file=sys.stderr)
            if sys.stderr.isatty()
            else None
        )
        self._stages.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stages.__exit__(kind, error, traceback)
        self._stream.close()
        if self._bar is not None:
            self._bar.close()

    def _compiling(self, stage: str) -> None:
        """Shows the stage of a compilation, during which no step finishes for seconds."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"compiling: {stage}")

    def update(self, step: int, loss: float, grad_norm: float | None, learning_rate: float) -> None:
        """Records update number `step` (from 1). learning_rate: the one that it used."""
        self._losses.append(loss)
        self._window_steps += 1
        compiled = self._stages.taken()
        if self._bar is not None:
            self._bar.update()
        elif compiled:
            print(f"{self.engine}: {compiled}", file=sys.stderr, flush=True)
        if step % self.logging_steps == 0 or step == self.total_steps:
            self._log(step, grad_norm, learning_rate)
        elif step == 1:
            # the first step prepares the engine; its time would distort the first line's rate
            self._window_started, self._window_steps = time.perf_counter(), 0

    def _log(self, step: int, grad_norm: float | None, learning_rate: float) -> None:
        now = time.perf_counter()
        seconds = (now - self._window_started) / self._window_steps
        line = Metrics(
            engine=self.engine,
            step=step,
            epoch=round(step / self.steps_per_epoch, 4),
            loss=sum(self._losses) / len(self._losses),
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            tokens_per_second=round(self.tokens_per_step / seconds, 1),
            step_ms=round(seconds * 1e3, 2),
            rss_mib=round(rss_mib(), 1),
            elapsed_s=round(now - self._started, 3),
        )
        self._stream.write(json.dumps(asdict(line), allow_nan=False) + "\n")
        self._stream.flush()
        shown = (
            f"loss {line.loss:.4f}  lr {learning_rate:.2e}  {line.tokens_per_second:.0f} tokens/s  "
            f"{line.step_ms:.0f} ms/step  {line.rss_mib:.0f} MiB"
        )
        if self._bar is not None:
            self._bar.set_postfix_str(shown)
        else:
            left = tqdm.format_interval((self.total_steps - step) * seconds)
            print(
                f"{self.engine}: step {step}/{self.total_steps}  {shown}  ETA {left}",
                file=sys.stderr,
                flush=True,
            )
        self._losses.clear()
        self._window_started, self._window_steps = now, 0
