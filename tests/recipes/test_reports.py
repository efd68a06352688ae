"""Runs of `onward finetune` that report to services: numbers, files and exit status are those of a
run that reports to none, whatever a service does."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_services import LONG, FakeService, raises, served

from onward.cli import main, parse
from onward.recipes import loop
from onward.recipes.options import FinetuneConfig
from onward.reporting import reporter

STEPS = 6
SENT = {
    "epoch", "loss", "grad_norm", "learning_rate", "tokens_per_second", "step_ms", "rss_mib",
    "data_share", "elapsed_s",
}  # fmt: skip
RESULTS = {
    "eval_loss", "eval_perplexity", "eval_samples", "eval_runtime", "train_loss", "train_runtime",
    "train_samples", "first_step_s", "train_tokens_per_second", "peak_rss_mib", "base_rss_mib",
}  # fmt: skip
Command = Callable[..., list[str]]


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory, text: str, model_folder: Path) -> Command:
    """The words of a short command line."""
    file = tmp_path_factory.mktemp("text") / "train.txt"
    file.write_text(text[:1200], encoding="utf-8")

    def words(output: Path, *more: str) -> list[str]:
        return [
            *("finetune", "--model", str(model_folder), "--train_file", str(file)),
            *("--output_dir", str(output), "--max_steps", str(STEPS), "--block_size", "16"),
            *("--per_device_train_batch_size", "2", "--logging_steps", "2", "--save_steps", "3"),
            *("--dropout", "0.2", "--learning_rate", "1e-2", "--engine", "torch", *more),
        ]

    return words


def outcome(output: Path) -> dict[str, Any]:
    """What a run has written, but for times and memory."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "epoch", "loss", "grad_norm", "learning_rate")
    results = json.loads((output / "eval_results.json").read_text())
    return {
        "metrics": [[line[name] for name in names] for line in lines],
        "results": [results[name] for name in ("eval_loss", "train_loss", "start_weights_sha256")],
        "model": (output / "model.safetensors").read_bytes(),
        "files": {p.name for p in output.iterdir()},
    }


@pytest.fixture(scope="module")
def plain(command: Command, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a run that reports to nobody has written."""
    output = tmp_path_factory.mktemp("plain") / "out"
    assert main(command(output)) == 0
    return outcome(output)


def test_metrics_results_and_options_are_sent(
    command: Command,
    plain: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake, other = FakeService(), FakeService()
    served(monkeypatch, fake=fake, other=other)
    output = tmp_path / "out"
    assert main(command(output, "--report_to", "fake", "other", "--run_name", "mine")) == 0
    assert outcome(output) == plain
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    results = json.loads((output / "eval_results.json").read_text())
    for service in (fake, other):
        assert service.steps == [2, 4, 6, 6] and service.ends == ["finished"]
        for record, line in zip(service.records, lines, strict=False):
            assert dict(record.metrics) == {name: line[name] for name in SENT}
        last = service.records[-1].metrics
        assert set(last) == RESULTS and not set(last) & SENT  # no step has a name twice
        assert last["eval_loss"] == results["eval_loss"]
        assert last["train_tokens_per_second"] == results["tokens_per_second"]
        [setup] = service.setups
        assert setup.name == "mine" and setup.logging_dir == output / "tensorboard"
        assert setup.config["learning_rate"] == 1e-2 and setup.config["max_steps"] == STEPS
        assert setup.config["parameters"] > 0 and "versions.torch" in setup.config
        assert not any(isinstance(value, dict | list) for value in setup.config.values())
    assert "note: " not in capsys.readouterr().err
    # a complete run has nothing to report
    assert main(command(output, "--report_to", "fake")) == 0
    assert len(fake.setups) == 1


class Stuck:
    """A call that comes back when the test lets it."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def __call__(self, call: int) -> None:
        self.gate.wait(LONG)


@pytest.mark.parametrize("place", ["opening", "before"])
def test_a_service_that_never_answers_changes_nothing(
    place: str,
    command: Command,
    plain: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stuck = Stuck()
    fake = FakeService(**{place: stuck})
    served(monkeypatch, fake=fake)
    monkeypatch.setattr(reporter, "CLOSE_SECONDS", 0.05)
    output = tmp_path / "out"
    assert main(command(output, "--report_to", "fake")) == 0
    assert outcome(output) == plain and fake.records == []
    [said] = [line for line in capsys.readouterr().err.splitlines() if "note: " in line]
    lost = "onward finetune: note: 4 of 4 records were not delivered to fake ("
    assert said.startswith(lost)
    assert said.endswith(f"); {output}/metrics.jsonl has every line")
    stuck.gate.set()


@pytest.mark.parametrize("error", [ConnectionError("refused"), OSError(28, "No space left")])
def test_a_service_that_fails_is_told_twice_and_changes_nothing(
    error: Exception,
    command: Command,
    plain: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    served(monkeypatch, fake=FakeService(before=raises(error)))
    output = tmp_path / "out"
    assert main(command(output, "--report_to=fake")) == 0
    assert outcome(output) == plain
    first, last = [line for line in capsys.readouterr().err.splitlines() if "note: " in line]
    assert f"reports to fake fail ({type(error).__name__}: " in first
    assert "4 of 4 records were not delivered to fake (" in last


def test_a_run_that_is_stopped_goes_on_at_the_services(
    command: Command,
    plain: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fake = FakeService()
    served(monkeypatch, fake=fake)
    output, update = tmp_path / "out", loop._update
    words = command(output, "--report_to", "fake")

    def stopped(*args: Any) -> Any:
        if len(fake.setups) == 1 and (output / "checkpoint-3").exists():
            fake.setups[0].keep("run-7")
            signal.raise_signal(signal.SIGTERM)
        return update(*args)

    monkeypatch.setattr(loop, "_update", stopped)
    assert main(words) == 143
    assert fake.steps == [2, 4] and fake.ends == ["stopped"]
    assert main(words) == 0
    assert fake.setups[-1].kept == "run-7"
    assert fake.steps == [2, 4, 6, 6] and fake.ends == ["stopped", "finished"]
    files = plain["files"] | {"checkpoint-4", "reports.json"}
    assert outcome(output) == {**plain, "files": files}
    assert main([*words, "--overwrite_output_dir"]) == 0  # another run, of another name
    assert fake.setups[-1].kept is None and not (output / "reports.json").exists()
    capsys.readouterr()


def test_a_run_that_fails_leaves_nothing_and_says_so_to_its_services(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeService()
    served(monkeypatch, fake=fake)
    output = tmp_path / "out"

    def failed(*args: Any) -> Any:
        fake.setups[0].keep("run-8")
        fake.setups[0].logging_dir.mkdir()
        (fake.setups[0].logging_dir / "events.out.tfevents.1").touch()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(loop, "_update", failed)
    with pytest.raises(RuntimeError, match="out of memory"):
        main(command(output, "--report_to", "fake"))
    assert fake.ends == ["failed"] and not output.exists()


def test_what_is_wrong_with_a_service_is_in_the_line_on_request() -> None:
    from onward.recipes.progress import Progress

    class Ill(reporter.Reporter):
        def status(self) -> str:
            return "mlflow fails (ConnectionError), 3 waiting"

    progress = Progress("torch", Path("metrics.jsonl"), 9, 3, 2, [1.0], reporter=Ill(None))
    progress._first = 1
    assert progress.status().endswith("  reports: mlflow fails (ConnectionError), 3 waiting")
    progress._reporter = reporter.Reporter("none")
    assert "reports" not in progress.status()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--report_to", "tensorboard", "mlflow", "--seed", "3"], "tensorboard,mlflow"),
        (["--report_to=tensorboard,mlflow", "--seed=3"], "tensorboard,mlflow"),
        (["--seed", "3", "--report-to", "all"], "all"),
        (["--seed", "3"], "none"),
    ],
)
def test_several_services_are_words_or_have_commas(words: list[str], expected: str) -> None:
    assert parse(words, "finetune", FinetuneConfig) == FinetuneConfig(seed=3, report_to=expected)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--report_to", "tensorbord"], "unknown service in report_to: 'tensorbord' (did you mean"),
        (["--report_to", "none", "all"], "report_to names none, all, in --report_to; fix: "),
        (["--report_to", "azure_ml"], "unknown service in report_to: 'azure_ml', in --report_to"),
        (["--report_to", "absent"], "no_such_package is not installed; fix: pip install 'onward["),
        (["--report_to", "fake", "--compare"], "a comparison is one measurement, and is not"),
        (["--report_to"], "option --report_to has no value"),
    ],
)
def test_what_cannot_be_reported_to_is_refused_in_one_line(
    words: list[str],
    line: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from onward.reporting import services

    served(monkeypatch, fake=FakeService())
    absent = services.ReportService("no_such_package", FakeService().writer)
    monkeypatch.setitem(services.SERVICES, "absent", absent)
    monkeypatch.chdir(tmp_path)
    assert main(["finetune", *words]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"onward finetune: error: {line}"), said
    assert list(tmp_path.iterdir()) == []
