"""SIGTERM and SIGINT at random moments, and KeyboardInterrupt within a step (R8)."""

from __future__ import annotations

import hashlib
import inspect
import mmap
import random
import signal
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import GPT2Config, GPT2LMHeadModel

from suite.fault_interrupts import TORN, within_updates
from suite.fault_kill import STUCK, WRONG, accepted, finished
from suite.fault_process import Child, Ended, in_child
from suite.fault_systems import System, Task, Watch
from suite.fault_table import GOOD, Effort, Line, Tally, row
from suite.progress import Clock, say

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STATUS = "ended with status {}"
PAUSE = 0.25  # seconds that a peer's micro-batch takes longer: Trainer waits 3 s before it saves
PROGRAM = "import sys; from onward.cli import main; sys.exit(main())"


def signalled(
    effort: Effort, systems: Mapping[str, System], work: Path, clock: Clock
) -> dict[str, Any]:
    """R8: a signal, the end of the process, the same script again."""
    whole = {number: Line(f"{number.name} at a random moment of a run") for number in SIGNALS}
    start = {
        number: Line(f"{number.name} while a new process imports and compiles")
        for number in SIGNALS
    }
    twice = Line("Ctrl-C, and once more 50 ms later")
    inside = Line("KeyboardInterrupt at a random moment of an update")
    for name, system in systems.items():
        if name == "Onward":
            command_line(effort, work / name, clock, whole, start, twice)
        else:
            peers(effort, name, system, work / name, clock, whole)
        inside.cells[name] = within_updates(effort, system, work / f"{name}-inside", clock)
        say(f"R8 {name}: {inside.cells[name].told()}")
    promise = (
        "Onward's column is `onward finetune`, in the last line a loop of one's own. Good: the "
        "process ends with status 143 or 130, as a shell names the two signals, and the same "
        "command, given again, ends bit for bit as the run that nothing stopped. transformers "
        "runs with `enable_jit_checkpoint`; accelerate does nothing about signals, so that its "
        "status is Python's. Last line, good: weights and moments after the exception are bit "
        "for bit those before the update or after it, or the system refuses to go on with them; "
        f'"{TORN}": they are neither, and nothing says so.'
    )
    return row("signals", promise, [*whole.values(), *start.values(), twice, inside])


# ---- onward finetune


def words(folder: Path, output: Path) -> list[str]:
    """A command line: dropout and accumulation are on, every second update is saved."""
    return [
        *("finetune", "--model", str(folder / "model"), "--train_file", str(folder / "text.txt")),
        *("--output_dir", str(output), "--max_steps", "12", "--block_size", "32"),
        *("--per_device_train_batch_size", "3", "--gradient_accumulation_steps", "2"),
        *("--logging_steps", "3", "--save_steps", "2", "--learning_rate", "1e-2"),
        *("--warmup_steps", "3", "--dropout", "0.2", "--lr_scheduler_type", "cosine"),
    ]


def prepared(folder: Path) -> None:
    """A text and a tiny GPT-2 for it."""
    from onward.recipes.corpus import train_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    text = inspect.getsource(ArgumentParser)
    (folder / "text.txt").write_text(text[:1650], encoding="utf-8")
    tokenizer = train_tokenizer([text], 320, 64)
    tokenizer.save_pretrained(folder / "model")
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder / "model")


def finetune(arguments: Sequence[str]) -> int:
    from onward.cli import main

    raise SystemExit(main(arguments))


def made(output: Path) -> str:
    """The digest of the model that a run has left."""
    path = output / "model.safetensors"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else "no model"


def command_line(
    effort: Effort,
    folder: Path,
    clock: Clock,
    whole: Mapping[signal.Signals, Line],
    start: Mapping[signal.Signals, Line],
    twice: Line,
) -> None:
    """`onward finetune`: in forks, where imports are done, and in new processes."""
    draw = random.Random(2)
    prepared(folder)
    in_child(lambda: finetune(words(folder, folder / "first")))  # fills the cache of graphs
    began = time.monotonic()
    in_child(lambda: finetune(words(folder, folder / "timed")))
    seconds = time.monotonic() - began
    sound = made(folder / "timed")
    assert sound != "no model", "a run without a fault has failed"

    def forked(number: int, output: Path, moment: float, again: float = 0.0) -> tuple[int, float]:
        child = Child(lambda: finetune(words(folder, output)))
        time.sleep(moment)
        child.kill(number)
        sent = time.monotonic()
        if again:
            time.sleep(again)
            child.kill(number)
        return child.wait().status, time.monotonic() - sent

    def begun(number: int, output: Path, moment: float) -> tuple[int, float]:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words(folder, output)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            # a shell in the background ignores SIGINT, and so would what is started there
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip
        time.sleep(moment)
        process.send_signal(number)
        sent = time.monotonic()
        return process.wait(), time.monotonic() - sent

    def counted(tally: Tally, moments: int, one: Callable[[Path], tuple[int, float]]) -> None:
        waits: list[float] = []
        for count in range(moments):
            if clock.over():
                break
            output = folder / f"{id(tally)}-{count}"
            status, wait = one(output)
            waits.append(wait)
            for _ in range(2):
                if made(output) != sound:
                    in_child(lambda output=output: finetune(words(folder, output)))
            fine = status in (0, 143, 130, -15, -2)
            same = GOOD if made(output) == sound else WRONG
            tally.add(same if fine else STATUS.format(status))
        if waits:
            tally.text = f"ends within {max(waits):.2f} s, median {statistics.median(waits):.2f}"

    for number in SIGNALS:
        tally = whole[number].cells["Onward"] = Tally()
        moment = seconds * 1.05
        counted(
            tally, max(1, effort.signals * 2 // 5),
            lambda output: forked(number, output, draw.uniform(0, moment)),  # noqa: B023
        )  # fmt: skip
        say(f"R8 onward finetune, {number.name}: {tally.told()}")
        tally = start[number].cells["Onward"] = Tally()
        counted(
            tally, max(1, effort.signals // 12),
            lambda output: begun(number, output, draw.uniform(0.5, 8.0)),  # noqa: B023
        )  # fmt: skip
        say(f"R8 a new process, {number.name}: {tally.told()}")
    tally = twice.cells["Onward"] = Tally()
    counted(
        tally, max(1, effort.signals // 20),
        lambda output: forked(signal.SIGINT, output, draw.uniform(0.3, 0.7) * seconds, 0.05),
    )  # fmt: skip


# ---- peers


def peers(
    effort: Effort,
    name: str,
    system: System,
    folder: Path,
    clock: Clock,
    whole: Mapping[signal.Signals, Line],
) -> None:
    """Signals for a peer's script; counts the updates that are done again."""
    task = Task(save_every=2, keep=2, on_sigterm=True)
    draw = random.Random(2)
    sound = accepted(system, folder)
    began = time.monotonic()
    finished(system, task, folder / "timed")
    seconds = time.monotonic() - began + PAUSE * task.updates * task.window
    for number in SIGNALS:
        tally = whole[number].cells[name] = Tally()
        waits: list[float] = []
        lost: list[int] = []
        for count in range(max(1, effort.signals // 10)):
            if clock.over():
                break
            output = folder / f"{number.name}-{count}"
            ended, wait, done = signalled_run(system, task, output, number, draw, seconds)
            waits.append(wait)
            again = in_child(lambda output=output: resumed_run(system, task, output))
            if again.status:
                tally.add(STUCK)
                continue
            lost.append(max(0, done - again.answer[1]))
            early = ended.status == 0 and again.answer[1] < task.updates and done < task.updates
            fine = ended.status in (0, 143, 130, -15, -2) and not early
            same = GOOD if again.answer[0] in sound else WRONG
            tally.add(
                same
                if fine
                else "ended with status 0 as if done"
                if early
                else STATUS.format(ended.status)
            )
        if waits:
            tally.text = (
                f"ends within {max(waits):.2f} s, median {statistics.median(waits):.2f}; up to "
                f"{max(lost, default=0)} updates lost"
            )
        say(f"R8 {name}, {number.name}: {tally.told()}")


def signalled_run(
    system: System, task: Task, folder: Path, number: int, draw: random.Random, seconds: float
) -> tuple[Ended, float, int]:
    """A run that gets a signal: how it ended, in how many seconds, how many updates were done."""
    at = mmap.mmap(-1, 8)

    def step(micro: int) -> None:
        at[:8] = (micro - 1).to_bytes(8, "little")
        time.sleep(PAUSE)

    child = Child(lambda: system(task, folder, Watch(step=step)))
    time.sleep(draw.uniform(0.0, seconds))
    child.kill(number)
    sent = time.monotonic()
    ended = child.wait()
    done = int.from_bytes(at[:8], "little") // task.window
    return ended, time.monotonic() - sent, done


def resumed_run(system: System, task: Task, folder: Path) -> tuple[str, int]:
    watch = Watch()
    return system(task, folder, watch), watch.resumed
