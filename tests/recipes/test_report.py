"""The report of a run: its numbers are those of the run's files, and nothing in it is markup."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from onward.cli import main
from onward.recipes.report.card import card
from onward.recipes.report.run_data import read_run
from onward.recipes.report.step_facts import step_facts
from onward.recipes.report.trace import trace
from onward.recipes.report.write import report_of_run
from onward.recipes.run_folder import RunFolder
from onward.train import Trainer

HOSTILE = "<script>alert(1)</script>"


class Seen(HTMLParser):
    """The tags, addresses, and cells of tables by section title of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self.heads: list[tuple[str, dict[str, str | None]]] = []
        self._title, self._inside = "", ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag == "meta":
            self.heads.append((tag, dict(attrs)))
        self.addresses += [v or "" for k, v in attrs if k.split(":")[-1] in ("href", "src")]
        self._inside = tag
        if tag == "h2":
            self._title = ""
        if tag == "tr":
            self.tables.setdefault(self._title, []).append([])
        if tag in ("td", "th"):
            self.tables[self._title][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "h2":
            self._title += data
        elif self._inside in ("td", "th"):
            self.tables[self._title][-1][-1] += data


@pytest.fixture(scope="module")
def planned() -> tuple[dict[str, Any], Any]:
    """The facts of a step of a small network, and the plan that ran."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3))
    trainer = Trainer(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2),
        nn.functional.cross_entropy,
    )
    trainer.train_step(torch.randn(4, 6), target=torch.randint(3, (4,)))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    facts = step_facts(trainer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return json.loads(json.dumps(facts)), trainer.snapshot().last_run.plan


def results(engine: str, speed: float) -> dict[str, Any]:
    return {
        "engine": engine, "step_losses": [3.0, 2.0], "first_step_s": 0.25, "train_s": 10.0,
        "eval_s": 1.5, "tokens_per_second": speed, "base_rss_mib": 100.0,
        "peak_rss_mib": 650.0 if engine == "onward" else 1000.0, "eval_loss": 2.5,
        "start_weights_sha256": "a",
    }  # fmt: skip


def made(folder: Path, planned: dict[str, Any], compare: bool = True, seed: int = 0) -> Path:
    """A folder as a run writes it."""
    (folder / "torch").mkdir(parents=True)
    options = {"model_name_or_path": HOSTILE, "max_steps": 4, "compare": compare, "seed": seed}
    record = {"command": ["onward", HOSTILE], "options": options, "versions": {"torch": "2"}}
    (folder / "run_config.json").write_text(json.dumps({**record, "parameters": 12}))
    for engine, file in (("onward", folder), ("torch", folder / "torch")):
        lines: list[dict[str, Any]] = [
            {"engine": engine, "step": n, "loss": 4.0 - n, "learning_rate": 0.1 / n,
             "tokens_per_second": 100.0, "grad_norm": None}
            for n in (1, 2)
        ]  # fmt: skip
        lines.insert(1, {"engine": engine, "step": 1, "eval_loss": 3.1})
        (file / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    both = [results("onward", 160.0), results("torch", 100.0)]
    (folder / "compare.json").write_text(json.dumps({"engines": both}))
    (folder / "step.json").write_text(json.dumps(planned))
    (folder / "samples.json").write_text(json.dumps([{"prompt": HOSTILE, "text": HOSTILE}]))
    return folder


@pytest.fixture
def folder(tmp_path: Path, planned: tuple[dict[str, Any], Any]) -> Path:
    return made(tmp_path / HOSTILE.replace("/", "_"), planned[0])


def test_page_has_the_numbers_of_the_files(folder: Path, planned: tuple[Any, Any]) -> None:
    page = report_of_run(folder)
    assert page == folder / "report.html"
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert "1.6x faster, 35 % less memory than eager PyTorch" in text
    seen = Seen(text)
    rows = {row[0]: row[1:] for row in seen.tables["Results"]}
    assert rows["total time, s"] == ["11.5", "11.5"]
    assert rows["tokens/s after the first step"] == ["160", "100"]
    assert rows["peak memory, MiB"] == ["650", "1000"]
    assert rows["final train loss (last 10 updates)"] == ["2.5000", "2.5000"]
    step = planned[0]
    kinds = {row[0]: float(row[1]) for row in seen.tables["Memory of the planned step"][1:]}
    memory = step["explanation"]["memory"]
    assert kinds.pop("all") == pytest.approx(memory["total"] / 2**20, abs=6e-4)
    for kind, shown in kinds.items():
        assert shown == pytest.approx(memory["kinds"][kind] / 2**20, abs=6e-4)
    by_op = seen.tables["Kernel launches"][1:]
    assert sum(int(row[1]) for row in by_op) == len(step["launches"])
    for row in by_op:
        of_op = [x for x in step["launches"] if x["op"] == row[0]]
        assert float(row[2]) == pytest.approx(sum(x["flops"] for x in of_op) / 1e6, abs=6e-3)
        assert float(row[5]) == pytest.approx(sum(x["seconds"] for x in of_op) * 1e3, abs=6e-4)
    passes = seen.tables["Passes and their edits"][1:]
    assert [int(row[3]) for row in passes] == [c["after"] for c in step["explanation"]["changes"]]
    options = {row[0]: row[1] for row in seen.tables["Options"]}
    assert options["model_name_or_path"] == HOSTILE


def test_page_runs_and_fetches_nothing(folder: Path) -> None:
    report_of_run(folder)
    text = (folder / "report.html").read_text(encoding="utf-8")
    seen = Seen(text)
    assert "script" not in seen.tags and {"svg", "table"} <= set(seen.tags)
    assert all(address.startswith("#") for address in seen.addresses)
    assert "http" not in text and "@import" not in text
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in [
        attributes for _, attributes in seen.heads
    ]
    assert text.count("prefers-color-scheme") == 1 and "#010203" not in text


def test_flops_are_those_that_torch_counts(planned: tuple[dict[str, Any], Any]) -> None:
    with FlopCounterMode(display=False) as counter:
        model = nn.Sequential(nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3))
        nn.functional.cross_entropy(model(torch.randn(4, 6)), torch.zeros(4).long()).backward()
    assert sum(x["flops"] for x in planned[0]["launches"]) == counter.get_total_flops()


def test_trace_is_in_order_and_peaks_where_the_plan_does(planned: tuple[Any, Any]) -> None:
    step, plan = planned
    found = trace(step)
    events = [event for event in found["traceEvents"] if event["ph"] == "X"]
    assert [event["name"] for event in events] == [launch.op for launch in plan.launches]
    for before, after in itertools.pairwise(events):
        assert before["dur"] >= 0
        assert after["ts"] == pytest.approx(before["ts"] + before["dur"])
    assert found["otherData"]["times"] == "measured"
    counted = [e["args"]["live bytes"] for e in found["traceEvents"] if e["ph"] == "C"]
    memory = step["explanation"]["memory"]
    assert max(counted) == plan.arena_bytes - memory["kinds"]["gaps"] > 0
    untimed = {**step, "launches": [{**x, "seconds": None} for x in step["launches"]]}
    assert trace(untimed)["otherData"]["times"].startswith("modelled")


def test_card_is_yaml_and_markdown_of_no_markup(folder: Path) -> None:
    _, front, body = card(read_run(folder)).split("---\n", 2)
    found = yaml.safe_load(front)
    assert found["base_model"] == HOSTILE and "onward" in found["tags"] and "license" not in found
    assert "| perplexity | 12.18 |" in body and "<script>" not in body


def test_other_files_stay(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "README.md").write_text("mine")
    (tmp_path / "notes.html").write_text("mine too")
    report_of_run(folder)
    assert main(["report", str(folder), "--output", str(tmp_path / "notes.html")]) == 2
    assert "is no report" in capsys.readouterr().err
    assert main(["report", str(folder)]) == 0  # its own page is replaced
    with RunFolder(folder) as held:
        held._clear()
    assert (folder / "README.md").read_text() == "mine"
    assert (tmp_path / "notes.html").read_text() == "mine too"
    assert {path.name for path in folder.iterdir()} == {"README.md", "run_config.json"}


def test_two_runs(
    tmp_path: Path, planned: tuple[Any, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [made(tmp_path / name, planned[0], seed=n) for n, name in enumerate("ab")]
    target = tmp_path / "both.html"
    assert main(["report", *map(str, paths), "--output", str(target)]) == 0
    assert capsys.readouterr().out == f"{target}\n"
    seen = Seen(target.read_text(encoding="utf-8"))
    assert seen.tables["Options that differ"] == [["", "run 1", "run 2"], ["seed", "0", "1"]]
    assert seen.tables["Results"][0][1:] == [
        "run 1: onward", "run 1: torch", "run 2: onward", "run 2: torch",
    ]  # fmt: skip


def test_damaged_lines_are_named_and_left_out(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"engine": "onward", "step": 3, "loss": NaN}\n[1]\n{"eng')
    (folder / "torch" / "metrics.jsonl").unlink()
    (folder / "step.json").write_text("{}")
    assert main(["report", str(folder)]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "onward report: note: metrics.jsonl: line 4 and 2 more damaged, and left out",
        "onward report: note: torch/metrics.jsonl has no lines yet",
    ]
    assert "step.json cannot be shown" in (folder / "report.html").read_text(encoding="utf-8")
    assert main(["report", str(folder / "torch")]) == 2
    assert "is no folder of a run" in capsys.readouterr().err
    assert main(["report"]) == 2


def test_live_page_is_written_until_the_run_is_complete(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = (folder / "compare.json").read_text()
    (folder / "compare.json").unlink()
    seen: list[bool] = []

    def wait(seconds: float) -> None:
        seen.append('http-equiv="refresh"' in (folder / "report.html").read_text(encoding="utf-8"))
        if len(seen) == 2:
            (folder / "compare.json").write_text(done)

    monkeypatch.setattr("onward.recipes.report.write.time.sleep", wait)
    assert main(["report", str(folder), "--live"]) == 0
    assert seen == [True, True]
    assert "refresh" not in (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    yield


@pytest.mark.usefixtures("without_matplotlib")
def test_without_matplotlib_the_run_has_its_trace_and_card(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_of_run(folder) is None
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("note: no report: ") and "onward[viz]" in line
    assert (folder / "trace.json").is_file() and (folder / "README.md").is_file()
    assert main(["report", str(folder)]) == 2


def test_certificate_is_shown_where_it_is(folder: Path) -> None:
    row = {"engine": "eager", "name": HOSTILE, "difference": 1e-7, "allowed": 2e-7}
    (folder / "verify.json").write_text(json.dumps({"rows": [row, {**row, "difference": 1}]}))
    report_of_run(folder)
    cells = Seen((folder / "report.html").read_text(encoding="utf-8")).tables[
        "Numerics certificate"
    ]
    assert [row[-1] for row in cells] == ["agrees", "NO", "yes"] and cells[1][1] == HOSTILE
