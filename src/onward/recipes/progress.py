"""Progress of a run: a bar on a terminal, plain lines elsewhere, and `metrics.jsonl`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

import psutil
from tqdm import tqdm

from onward.recipes.score_numbers import score_number
from onward.recipes.stages import Stages
from onward.reporting import Reporter

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

    loss: mean over the updates since the previous line. grad_norm: global 2-norm
    before clipping, of the last update; None where not clipped. tokens_per_second, step_ms: over
    the same updates, without the run's first one if possible. data_share: of that time, what the
    updates waited for their batches. rss_mib: present resident memory. elapsed_s: since the run's
    start.
    """

    engine: str
    step: int
    epoch: float
    loss: float
    grad_norm: float | None
    learning_rate: float
    tokens_per_second: float
    step_ms: float
    data_share: float
    rss_mib: float
    elapsed_s: float


SHOWN_SHARE = 0.05  # of the time, from which waiting for data stands in a progress line


class Progress:
    """Collects one entry per update, and shows the mean of every `logging_steps` of them.

    metrics_file: gets a line for each; None: another process writes them.

    losses: of the updates that the run has done before, to which the new ones are added; the lines
    of the metrics file are those up to there. elapsed_s: the seconds that those took. reporter:
    gets the numbers of every line too.
    """

    def __init__(
        self,
        engine: str,
        metrics_file: Path | None,
        total_steps: int,
        steps_per_epoch: int,
        logging_steps: int,
        losses: list[float] | None = None,
        elapsed_s: float = 0.0,
        reporter: Reporter | None = None,
    ) -> None:
        self.engine = engine
        self.total_steps = total_steps
        self.steps_per_epoch = steps_per_epoch
        self.logging_steps = logging_steps
        self._metrics_file = metrics_file
        self._reporter = Reporter(None) if reporter is None else reporter
        self._losses = [] if losses is None else losses
        self._first = len(self._losses) + 1  # the first update of this process
        self._logged = (self._first - 1) // logging_steps * logging_steps
        self._window_started = time.perf_counter()
        self._began = self._window_started
        self._started = self._began - elapsed_s
        self._window_steps, self._window_tokens, self._window_waited = 0, 0, 0.0
        self._stages = Stages(self._compiling)

    def __enter__(self) -> Progress:
        file = self._metrics_file
        self._stream = None if file is None else file.open("a", encoding="utf-8")
        self._bar = (
            tqdm(
                total=self.total_steps,
                initial=self._first - 1,
                desc=self.engine,
                unit="step",
                file=sys.stderr,
            )
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
        if self._stream is not None:
            self._stream.close()
        if self._bar is not None:
            self._bar.close()

    def _compiling(self, stage: str) -> None:
        """Shows the stage of a compilation, during which no step finishes for seconds."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"compiling: {stage}")

    def update(
        self,
        step: int,
        loss: float,
        grad_norm: float | None,
        learning_rate: float,
        tokens: int,
        waited_s: float = 0.0,
    ) -> None:
        """Records update number `step` (from 1). learning_rate: the one that it used. tokens: of
        its batches. waited_s: seconds until these were there."""
        self._losses.append(loss)
        self._window_steps += 1
        self._window_tokens += tokens
        self._window_waited += waited_s
        compiled = self._stages.taken()
        if self._bar is not None:
            self._bar.update()
        elif compiled:
            print(f"{self.engine}: {compiled}", file=sys.stderr, flush=True)
        if step % self.logging_steps == 0 or step == self.total_steps:
            self._log(step, grad_norm, learning_rate)
        elif step == self._first:
            # the first step prepares the engine; its time would distort the first line's rate
            self._window_started = time.perf_counter()
            self._window_steps, self._window_tokens, self._window_waited = 0, 0, 0.0

    def evaluated(self, step: int, loss: float, scores: Mapping[str, float]) -> None:
        """Records an evaluation after update number `step`: its mean loss, and scores."""
        values = {
            "epoch": round(step / self.steps_per_epoch, 4),
            "eval_loss": loss,
            **{f"eval_{name}": value for name, value in scores.items()},
        }
        if self._stream is not None:
            line = {"engine": self.engine, "step": step, **values}
            self._stream.write(json.dumps(line, allow_nan=False) + "\n")
            self._stream.flush()
        self._reporter.log(step, values)
        named = (f"{n.replace('_', ' ')} {score_number(v)}" for n, v in scores.items())
        shown = "  ".join([f"eval loss {loss:.4f}", *named])
        line = f"{self.engine}: step {step}/{self.total_steps}  {shown}"
        if self._bar is not None:
            self._bar.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)

    @contextmanager
    def paused(self) -> Generator[None]:
        """A context whose seconds count for no update. All lines are on the disk at its start, so
        that a checkpoint which is written within it is never ahead of them."""
        if self._stream is not None:
            os.fsync(self._stream.fileno())
        started = time.perf_counter()
        yield
        self._window_started += time.perf_counter() - started

    def status(self) -> str:
        """How far the run is, in one line."""
        done = len(self._losses)
        if done < self._first:
            return f"{self.engine}: step {done}/{self.total_steps}, preparing the next one"
        seconds = (time.perf_counter() - self._began) / (done - self._first + 1)
        left = tqdm.format_interval((self.total_steps - done) * seconds)
        return (
            f"{self.engine}: step {done}/{self.total_steps}  "
            f"epoch {done / self.steps_per_epoch:.2f}  loss {self._losses[-1]:.4f}  "
            f"{rss_mib():.0f} MiB  ETA {left}{self._reports()}"
        )

    def _reports(self) -> str:
        """What is wrong with the services that the run is reported to; "" where nothing is."""
        told = self._reporter.status()
        return f"  reports: {told}" if told else ""

    def _log(self, step: int, grad_norm: float | None, learning_rate: float) -> None:
        now = time.perf_counter()
        seconds = (now - self._window_started) / self._window_steps
        losses = self._losses[self._logged :]
        line = Metrics(
            engine=self.engine,
            step=step,
            epoch=round(step / self.steps_per_epoch, 4),
            loss=sum(losses) / len(losses),
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            tokens_per_second=round(self._window_tokens / (now - self._window_started), 1),
            step_ms=round(seconds * 1e3, 2),
            data_share=round(min(self._window_waited / (now - self._window_started), 1.0), 4),
            rss_mib=round(rss_mib(), 1),
            elapsed_s=round(now - self._started, 3),
        )
        values = asdict(line)
        if self._stream is not None:
            self._stream.write(json.dumps(values, allow_nan=False) + "\n")
            self._stream.flush()
        self._reporter.log(step, {k: v for k, v in values.items() if k not in ("engine", "step")})
        shown = (
            f"loss {line.loss:.4f}  lr {learning_rate:.2e}  {line.tokens_per_second:.0f} tokens/s  "
            f"{line.step_ms:.0f} ms/step  {line.rss_mib:.0f} MiB"
        )
        if line.data_share >= SHOWN_SHARE:
            shown += f"  waits for data {line.data_share:.0%}"
        if self._bar is not None:
            self._bar.set_postfix_str(shown)
        else:
            left = tqdm.format_interval((self.total_steps - step) * seconds)
            print(
                f"{self.engine}: step {step}/{self.total_steps}  {shown}  ETA {left}",
                file=sys.stderr,
                flush=True,
            )
        self._logged = step
        self._window_started = now
        self._window_steps, self._window_tokens, self._window_waited = 0, 0, 0.0
