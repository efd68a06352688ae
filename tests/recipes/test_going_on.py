"""A run that is stopped in any way and given again is the run that never stopped, to the bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from onward.cli import main
from onward.recipes import loop
from onward.recipes.finetune import same_again

STEPS, EPOCH = 8, 5  # updates of a run, and of an epoch
Run = Callable[..., int]


@pytest.fixture(autouse=True)
def signals_heard() -> Iterator[None]:
    """Signals as a program at a terminal has them: one in the background, or under nohup, ignores
    some, and so does a run in it."""
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in found.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def command(
    tmp_path_factory: pytest.TempPathFactory, text: str, model_folder: Path
) -> Callable[[Path], list[str]]:
    """The words of a command line: dropout and accumulation are on, saves and lines do not fall
    together, the order of blocks changes within the run."""
    file = tmp_path_factory.mktemp("text") / "train.txt"
    file.write_text(text[:1650], encoding="utf-8")

    def words(output: Path) -> list[str]:
        return [
            *("finetune", "--model", str(model_folder), "--train_file", str(file)),
            *("--output_dir", str(output), "--max_steps", str(STEPS), "--block_size", "32"),
            *("--per_device_train_batch_size", "3", "--gradient_accumulation_steps", "2"),
            *("--logging_steps", "3", "--save_steps", "2", "--learning_rate", "1e-2"),
            *("--warmup_steps", "3", "--dropout", "0.2", "--lr_scheduler_type", "cosine"),
        ]

    return words


@pytest.fixture(scope="module")
def whole(
    command: Callable[[Path], list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Any]]:
    """What an engine's run that nothing stops has written; each is run once."""
    made: dict[str, dict[str, Any]] = {}

    def of(engine: str) -> dict[str, Any]:
        if engine not in made:
            output = tmp_path_factory.mktemp("whole") / engine
            assert main([*command(output), "--engine", engine]) == 0
            made[engine] = outcome(output)
        return made[engine]

    return of


def outcome(output: Path) -> dict[str, Any]:
    """All numbers of a finished run that are not times or memory."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    names = ("engine", "step", "epoch", "loss", "grad_norm", "learning_rate")
    results = json.loads((output / "eval_results.json").read_text())
    onnx = output / "model.onnx"
    # a process that has only to save, and makes no update, writes none of these
    planned = {"step.json", "trace.json"}
    return {
        "metrics": [[line[name] for name in names] for line in lines],
        "results": [results[name] for name in ("eval_loss", "train_loss", "start_weights_sha256")],
        "model": (output / "model.safetensors").read_bytes(),
        "config": (output / "config.json").read_bytes(),
        "onnx": onnx.read_bytes() if onnx.exists() else None,
        "files": {p.name for p in output.iterdir() if not p.name.startswith("checkpoint-")}
        - planned,
    }


def steps_of(output: Path) -> list[int]:
    return [json.loads(x)["step"] for x in (output / "metrics.jsonl").read_text().splitlines()]


def saved_in(output: Path) -> list[str]:
    return sorted(path.name for path in output.glob("*checkpoint-*"))


def stopped_at(step: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on a signal comes within update number `step` of each process."""
    update, calls = loop._update, 0

    def updated(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == step:
            signal.raise_signal(number)
        return update(*args)

    monkeypatch.setattr(loop, "_update", updated)


def started(words: list[str], said: Path, prepare: Callable[[], None] = lambda: None) -> int:
    """Runs a command line in a process of its own, which is this one with all that it has
    imported. Returns its number."""
    child = os.fork()
    if child:
        return child
    try:
        handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for number in (1, 2):
            os.dup2(handle, number)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # later processes read what the first one has compiled
        os.environ["ONWARD_GRAPH_CACHE"] = "1"
        prepare()
        status = main(words)
        sys.stdout.flush()
    except BaseException as error:
        os.write(2, repr(error).encode())
        status = 99
    os._exit(status)


def ended(child: int) -> int:
    """The exit status of a process, or minus the signal that has killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def lines_written(output: Path, count: int, child: int) -> None:
    """Waits until a run has written so many lines of metrics."""
    path = output / "metrics.jsonl"
    for _ in range(6000):
        if path.exists() and path.read_bytes().count(b"\n") >= count:
            return
        assert os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        time.sleep(0.02)
    raise AssertionError("no lines came")


def waited_for(words: str, said: Path) -> None:
    """Waits until a process has said something."""
    for _ in range(3000):
        if words in said.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(said.read_text())


def slow_updates(seconds: float) -> Callable[[], None]:
    """Makes each update of a process take longer, so that a signal finds it training."""

    def prepare() -> None:
        update = loop._update

        def slow(*args: Any) -> Any:
            time.sleep(seconds)
            return update(*args)

        loop._update = slow  # type: ignore[assignment]

    return prepare


def killed_at_call(name: str, count: int) -> Callable[[], None]:
    """Has a process killed before its call of `os.<name>` of this number."""

    def prepare() -> None:
        call, made = getattr(os, name), 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal made
            made += 1
            if made == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        setattr(os, name, counted)

    return prepare


def test_killed_terminated_and_killed_in_a_save(
    command: Callable[[Path], list[str]], whole: Callable[[str], dict[str, Any]], tmp_path: Path
) -> None:
    """One run in five processes: each is ended in another way, and the next is given the same
    command."""
    output, said = tmp_path / "out", tmp_path / "said"
    words = command(output)

    child = started(words, said, slow_updates(0.2))
    lines_written(output, 1, child)  # after update 3: a checkpoint of update 2 is there
    os.kill(child, signal.SIGKILL)
    assert ended(child) == -signal.SIGKILL
    assert "checkpoint-2" in saved_in(output)

    child = started(words, said, slow_updates(0.2))
    lines_written(output, 2, child)
    os.kill(child, signal.SIGTERM)
    assert ended(child) == 143
    line = said.read_text().splitlines()[-1]
    assert line.startswith("onward finetune: stopped by SIGTERM, saved in ")
    assert f"; to go on: onward {' '.join(words[:2])}" in line
    newest = max(int(name.rpartition("-")[2]) for name in saved_in(output))
    assert f"checkpoint-{newest};" in line and newest < STEPS

    assert ended(started(words, said, killed_at_call("fsync", 9))) == -signal.SIGKILL
    assert [name for name in saved_in(output) if name.startswith(".")]  # one without its name
    assert ended(started(words, said)) == 0
    assert f"goes on from {output}/checkpoint-" in said.read_text()
    assert not [name for name in saved_in(output) if name.startswith(".")]
    assert outcome(output) == whole("onward")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onward", "torch"])
@pytest.mark.parametrize("call", ["fsync", "replace", "rename"])
def test_killed_at_any_call_that_changes_the_disk(
    call: str,
    engine: str,
    command: Callable[[Path], list[str]],
    whole: Callable[[str], dict[str, Any]],
    tmp_path: Path,
) -> None:
    """Each process makes some calls more than the one before it, until one comes to the end."""
    output, said = tmp_path / "out", tmp_path / "said"
    words = [*command(output), "--engine", engine, "--save_total_limit", "1"]
    for count in range(1, 200, 3 if call == "fsync" else 1):
        status = ended(started(words, said, killed_at_call(call, count)))
        assert status in (0, -signal.SIGKILL), said.read_text()
        if status == 0:
            break
    found, expected = outcome(output), whole(engine)
    assert found == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_run_after_the_running_update(
    number: signal.Signals,
    command: Callable[[Path], list[str]],
    whole: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """In each process two updates are done; what is logged is never logged twice."""
    output = tmp_path / "out"
    words = [*command(output), "--engine", "torch"]
    handlers = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    whole("torch")
    for process in range(1, STEPS // 3 + 1):
        capfd.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            stopped_at(3, number, patch)
            assert main(words) == 128 + number
        *lines, line = capfd.readouterr().err.splitlines()
        told = f"onward finetune: {number.name}: the running update is finished"
        assert any(each.startswith(told) for each in lines)
        assert line.startswith(f"onward finetune: stopped by {number.name}, saved in {output}")
        assert f"checkpoint-{3 * process}" in saved_in(output)
        assert steps_of(output) == list(range(3, 3 * process + 1, 3))
    assert main(words) == 0
    assert outcome(output) == whole("torch")
    after = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    assert handlers == after


def test_a_second_interrupt_stops_at_once_and_another_signal_asks(
    command: Callable[[Path], list[str]], tmp_path: Path
) -> None:
    output, said = tmp_path / "out", tmp_path / "said"
    child = started([*command(output), "--engine", "torch"], said, slow_updates(0.5))
    lines_written(output, 1, child)
    os.kill(child, signal.SIGUSR1)
    waited_for("onward finetune: torch: ", said)
    [line] = [x for x in said.read_text().splitlines() if x.startswith("onward finetune: torch")]
    assert f"step 3/{STEPS}  epoch 0.60  loss " in line and "ETA" in line
    os.kill(child, signal.SIGINT)
    waited_for("a second one stops at once\n", said)
    os.kill(child, signal.SIGINT)
    assert ended(child) == -signal.SIGINT
    assert saved_in(output) == ["checkpoint-2"]


def test_what_is_done_is_not_done_again_and_another_run_is_refused(
    command: Callable[[Path], list[str]],
    whole: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    words = [*command(output), "--engine", "torch"]
    assert main(words) == 0
    assert saved_in(output) == [f"checkpoint-{n}" for n in (2, 4, 6, 8)]
    before = {path: path.stat().st_mtime_ns for path in output.rglob("*")}
    capsys.readouterr()
    assert main(words) == 0
    assert f"the run in {output} is complete: nothing is left to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before

    other = [*words, "--seed", "7", "--weight_decay", "0.5"]
    assert main(other) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"error: '{output}' is of another run (" in line
    assert "(--weight_decay 0.01 there, 0.5 here; --seed 42 there, 7 here)" in line
    assert {path: path.stat().st_mtime_ns for path in output.rglob("*")} == before

    # what was lost at the end is made again from the last checkpoint, without an update
    for name in ("eval_results.json", "model.safetensors"):
        (output / name).unlink()
    assert main(words) == 0
    assert outcome(output) == whole("torch")

    assert main([*other, "--overwrite_output_dir", "--save_total_limit", "1"]) == 0
    assert saved_in(output) == ["checkpoint-8"]
    assert outcome(output)["model"] != whole("torch")["model"]


def test_a_damaged_checkpoint_is_passed_over(
    command: Callable[[Path], list[str]],
    whole: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    words = [*command(output), "--engine", "torch"]
    with monkeypatch.context() as patch:
        stopped_at(5, signal.SIGTERM, patch)
        assert main(words) == 143
    weights = output / "checkpoint-5" / "model.safetensors"
    damaged = bytearray(weights.read_bytes())
    damaged[-1] ^= 1
    weights.write_bytes(damaged)
    copied = shutil.copytree(output, tmp_path / "copied")
    assert main(words) == 0
    assert f"goes on from {output / 'checkpoint-4'}" in capsys.readouterr().err
    assert outcome(output) == whole("torch")

    # all of them damaged: nothing begins anew in silence
    for path in copied.glob("checkpoint-*/manifest.json"):
        path.write_text("{")
    assert main([*command(copied), "--engine", "torch"]) == 2
    assert "none of the 3 checkpoints in" in capsys.readouterr().err
    assert len(saved_in(copied)) == 3


def test_a_named_checkpoint(
    command: Callable[[Path], list[str]],
    whole: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    torch = ["--engine", "torch"]
    assert main([*command(first), *torch, "--resume_from_checkpoint", "true"]) == 2
    assert "there is no checkpoint in" in capsys.readouterr().err and not first.exists()
    with monkeypatch.context() as patch:
        stopped_at(7, signal.SIGTERM, patch)
        assert main([*command(first), *torch]) == 143
    named = [*torch, "--resume_from_checkpoint", str(first / "checkpoint-4")]
    assert main([*command(second), *named, "--seed", "1"]) == 2
    assert "--seed 42 there, 1 here" in capsys.readouterr().err and not second.exists()
    assert main([*command(second), *named]) == 0
    assert steps_of(second) == [3, 6, 8] and "checkpoint-2" not in saved_in(second)
    assert outcome(second) == whole("torch")
    # a checkpoint by itself knows its run too
    alone = shutil.copytree(first / "checkpoint-4", tmp_path / "alone")
    third = command(tmp_path / "third")
    assert main([*third, *torch, "--resume_from_checkpoint", str(alone), "--seed", "1"]) == 2
    assert "--seed 42 there, 1 here" in capsys.readouterr().err
    assert main([*command(first), *named]) == 0
    assert outcome(first) == whole("torch")


def test_saves_at_the_end_of_epochs_or_never(
    command: Callable[[Path], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def words(name: str) -> list[str]:
        found = [*command(tmp_path / name), "--engine", "torch", "--save_strategy", name]
        del found[found.index("--save_steps") : found.index("--save_steps") + 2]
        return found

    assert main(words("epoch")) == 0
    assert saved_in(tmp_path / "epoch") == [f"checkpoint-{EPOCH}", f"checkpoint-{STEPS}"]
    stopped_at(2, signal.SIGTERM, monkeypatch)
    assert main(words("no")) == 143
    assert capsys.readouterr().err.splitlines()[-1].endswith("stopped by SIGTERM; nothing is saved")
    assert not (tmp_path / "no").exists()


def test_a_full_disk_costs_one_checkpoint(
    command: Callable[[Path], list[str]],
    whole: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from onward.checkpoint.checkpoint import PackedCheckpoint

    write = PackedCheckpoint.write

    def full(packed: PackedCheckpoint, folder: Path) -> None:
        if folder.name == "checkpoint-4":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(packed, folder)

    monkeypatch.setattr(PackedCheckpoint, "write", full)
    output = tmp_path / "out"
    assert main([*command(output), "--engine", "torch"]) == 0
    assert "checkpoint-4 cannot be written: No space left on device" in capsys.readouterr().err
    assert saved_in(output) == [f"checkpoint-{n}" for n in (2, 6, 8)]
    assert outcome(output) == whole("torch")


def test_a_checkpoint_is_a_model_for_transformers(
    command: Callable[[Path], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoModelForCausalLM

    output = tmp_path / "out"
    stopped_at(1, signal.SIGTERM, monkeypatch)
    assert main([*command(output), "--engine", "torch"]) == 143
    model = AutoModelForCausalLM.from_pretrained(output / "checkpoint-1")
    assert model.config.use_cache
    stored = load_file(output / "checkpoint-1" / "model.safetensors")
    assert all((model.state_dict()[name] == value).all() for name, value in stored.items())


def test_other_weights_in_the_model_folder_are_refused(
    command: Callable[[Path], list[str]],
    model_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = shutil.copytree(model_folder, tmp_path / "model")
    words = [*command(tmp_path / "out"), "--engine", "torch"]
    words[words.index(str(model_folder))] = str(model)
    with monkeypatch.context() as patch:
        stopped_at(1, signal.SIGTERM, patch)
        assert main(words) == 143
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\1\2\3\4")
    capsys.readouterr()
    assert main(words) == 2
    assert "the checkpoint began with other weights" in capsys.readouterr().err


def test_the_command_that_goes_on() -> None:
    words = ["onward", "finetune", "--overwrite-output-dir", "true", "--seed", "1"]
    words += ["--output_dir=a", "--bf16", "--resume_from_checkpoint", "a/b", "--model", "m"]
    again = " ".join(same_again(words, Path("b")))
    assert again == "onward finetune --seed 1 --bf16 --model m --output_dir b"
