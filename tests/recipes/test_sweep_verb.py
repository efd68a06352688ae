"""`onward sweep`: the runs that a file asks for, and what becomes of them."""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from onward.cli import main, parse
from onward.recipes import sweep as recipe
from onward.recipes.options import FinetuneConfig
from onward.recipes.sweep_file import runs_of

BASE = """base:
  vocab_size: 300
  config_overrides: n_layer=1,n_embd=16,n_head=2
  block_size: 16
  max_steps: 2
  max_train_samples: 32
  max_eval_samples: 2
  engine: torch
"""


def written(tmp_path: Path, text: str) -> str:
    (tmp_path / "sweep.yaml").write_text(text, encoding="utf-8")
    return str(tmp_path / "sweep.yaml")


def test_a_grid_is_the_product_of_its_lists(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "base: {seed: 9, max-steps: 5}\ngrid:\n  learning_rate: [1e-4, 1e-3]\n  seed: [1, 2, 3]\n"
    )
    words = ["sweep", written(tmp_path, text), "--output_dir", str(tmp_path / "out"), "--dry_run"]
    assert main(words) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    found: list[tuple[float | None, int]] = []
    for line in lines:
        assert line[:2] == ["onward", "finetune"]
        config = parse(line[2:], "finetune", FinetuneConfig)
        assert config is not None and config.max_steps == 5
        found.append((config.learning_rate, config.seed))
        name = f"learning_rate={line[-2 - 1].partition('=')[2]},seed={config.seed}"
        assert config.output_dir == str(tmp_path / "out" / name)
    assert found == list(itertools.product([1e-4, 1e-3], [1, 2, 3]))
    assert not (tmp_path / "out").exists()


def test_a_list_of_runs_over_a_base(tmp_path: Path) -> None:
    text = "base: {seed: 9}\nruns:\n- seed: 1\n- {bf16: true, train_file: a/b.txt}\n"
    first, second = runs_of(written(tmp_path, text))
    assert first.words == ["--seed=1"] and first.name == "seed=1"
    assert second.words == ["--seed=9", "--bf16=true", "--train_file=a/b.txt"]
    assert "/" not in second.name and second.varied == {"bf16": "true", "train_file": "a/b.txt"}
    longer = runs_of(written(tmp_path, text + "- {bf16: true, train_file: a_b.txt}\n"))
    assert [run.name for run in longer[:2]] == [first.name, second.name], "names stay"
    assert longer[2].name != second.name


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty, as SWEEP"),
        ("base: {}", "has neither grid nor runs, as SWEEP"),
        ("grid: {seed: [1]}\nruns: [{seed: 1}]", "has both grid and runs"),
        ("grd: {seed: [1]}", "unknown part 'grd' of a sweep, in {file}, line 1"),
        ("grid:\n  seed: 1", "seed of the grid is no list of values, in {file}, line 2"),
        ("grid:\n  sede: [1]", "unknown option --sede, in {file}, line 2; fix: did you mean seed?"),
        ("runs:\n- seed: 1\n- seed: 1", "two runs have the same options, in {file}, line 3"),
        ("runs:\n- seed: 1\n- seed: -1", "seed is -1, in {file}, line 3; fix: give a value from"),
        (
            "base:\n  output_dir: a\ngrid: {seed: [1]}",
            "the sweep sets output_dir itself, in {file}",
        ),
        ("base: {bf16: true}\ngrid:\n  fp16: [false, true]", "in {file}, line 1 and in {file}"),
        ("grid:\n  max_steps: [1, many]", "max_steps is 'many', in {file}, line 2"),
        ("grid:\n  seed: [1]\n  seed: [2]", "option seed twice, in {file}, line 3"),
    ],
)
def test_no_run_starts_unless_all_can(
    text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, text)
    assert main(["sweep", path, "--output_dir", str(tmp_path / "out")]) == 2
    told = capsys.readouterr()
    assert said.format(file=path) in told.err and told.err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_runs_train_and_their_results_are_ranked(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Three real runs, of which one cannot be; then the same command again."""
    started: list[str] = []

    def here(command: Sequence[str]) -> tuple[int, str]:
        words = list(command[command.index("finetune") :])
        started.append(words[-1].rpartition("/")[2])
        status = main(words)
        told = capsys.readouterr()
        return status, told.err.strip().splitlines()[-1]

    monkeypatch.setattr(recipe, "_ran", here)
    text = f"{BASE}  train_file: {text_file}\nruns:\n- learning_rate: 1e-9\n"
    path = written(tmp_path, f"{text}- block_size: 4000000\n- learning_rate: 0.05\n")
    words = ["sweep", path, "--output_dir", str(tmp_path / "out"), "--json"]
    assert main(words) == 1
    rows = json.loads(capsys.readouterr().out)
    assert [row["run"] for row in rows] == [
        "learning_rate=0.05", "learning_rate=1e-9", "block_size=4000000",
    ]  # fmt: skip
    for row in rows[:2]:
        results = json.loads((tmp_path / "out" / row["run"] / "eval_results.json").read_text())
        assert row["eval_loss"] == results["eval_loss"] and row["state"] == "complete"
    assert rows[0]["eval_loss"] < rows[1]["eval_loss"]
    assert rows[2]["state"] == "failed" and "positions" in rows[2]["reason"]
    assert started == ["learning_rate=1e-9", "block_size=4000000", "learning_rate=0.05"]
    started.clear()
    assert main(words[:-1]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert started == ["block_size=4000000"], "complete runs are not started again"
    assert [line.split()[0] for line in lines] == ["run", *(row["run"] for row in rows)]
    assert f"{rows[0]['eval_loss']:.4f}" in lines[1] and "failed: onward finetune" in lines[3]
    started.clear()
    path = written(tmp_path, f"{text}- learning_rate: 0.05\n".replace("samples: 2", "samples: 3"))
    assert main(words[:-1]) == 1
    assert started == ["learning_rate=1e-9", "learning_rate=0.05"], "other options are other runs"
    assert capsys.readouterr().out.count("is of another run (--max_eval_samples 2 there") == 2


PROGRAM = (
    "import sys, pathlib; folder = pathlib.Path(sys.argv[-1].partition('=')[2])\n"
    "folder.mkdir(parents=True, exist_ok=True); seed = folder.name[-1]\n"
    "print('result'); print('trains', file=sys.stderr)\n"
    "if seed == '2' and not (folder / 'saved').exists():\n"
    "    (folder / 'saved').touch(); sys.exit(143)\n"
    "if seed == '3': print('out of luck', file=sys.stderr); sys.exit(7)\n"
    "r = dict.fromkeys(['perplexity', 'train_loss', 'train_runtime'], 1) | {'eval_loss': 9}\n"
    "import json; (folder / 'eval_results.json').write_text(json.dumps(r))\n"
)


def test_a_stopped_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Processes that end as those of runs do: well, stopped by a signal, failing."""

    def command(*words: str) -> list[str]:
        return [sys.executable, "-c", PROGRAM, *words]

    monkeypatch.setattr(recipe, "own_command", command)
    words = ["sweep", written(tmp_path, "grid: {seed: [1, 2, 3, 4]}\n")]
    words += ["--output_dir", str(tmp_path / "out"), "--json"]

    def states() -> dict[str, Any]:
        rows = json.loads(capsys.readouterr().out)
        return {row["run"][-1]: (row["state"], row.get("reason")) for row in rows}

    assert main(words) == 143
    assert states() == {
        "1": ("complete", None), "2": ("stopped", None), "3": ("not started", None),
        "4": ("not started", None),
    }  # fmt: skip
    assert main(words) == 1
    assert states() == {
        "1": ("complete", None), "2": ("complete", None), "3": ("failed", "out of luck"),
        "4": ("complete", None),
    }  # fmt: skip
    record = json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert record["seed=3"]["status"] == 7
    (tmp_path / "out" / "sweep.json").write_text("[]")
    assert main(words) == 2
    assert "cannot read" in capsys.readouterr().err


def test_nothing_heavy_is_loaded_to_list_runs(tmp_path: Path) -> None:
    import subprocess

    path = written(tmp_path, "grid: {seed: [1, 2]}")
    code = (
        "import sys; from onward.cli import main\n"
        f"assert main(['sweep', {path!r}, '--dry_run']) == 0\n"
        "assert not {'torch', 'transformers', 'onnx', 'numpy'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.count("\n") == 2
