"""Programs and command lines of all pages: each program is executed by a test, each option that a
command line names is one of its command."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import onward
from onward.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_PROGRAM = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_BLOCK = re.compile(r"^```(?:bash)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_OPTION = re.compile(r"--([A-Za-z][\w-]*)")
# pages with programs, and what runs them
EXECUTED = {
    "docs/distributed.md": "tests/site/test_snippets.py",
    "docs/explain.md": "tests/site/test_snippets.py",
    "docs/gpu.md": "tests/site/test_snippets.py",
    "docs/export.md": "tests/train/test_export_training.py",
    "docs/from_scratch.md": "tests/test_from_scratch.py",
    "docs/onnx.md": "tests/onnx_models/test_page.py",
    "docs/quickstart.md": "tests/site/test_quickstart.py",
    "docs/stages.md": "tests/site/test_stages_page.py",
    "docs/trainer.md": "tests/test_readme.py",
    "docs/tutorial.md": "tests/test_tutorial.py",
    "docs/migration/from-optimum.md": "tests/test_migration.py",
    "docs/migration/from-ortmodule.md": "tests/test_migration.py",
    "docs/migration/from-orttrainer.md": "tests/test_migration.py",
    "docs/migration/from-torch-compile.md": "tests/test_migration.py",
}
# pages whose programs are options and calls of a Trainer that is there
OF_A_TRAINER = sorted((ROOT / "docs" / "distributed").glob("*.md"))


def programs_of(page: str) -> list[str]:
    return _PROGRAM.findall((ROOT / page).read_text(encoding="utf-8"))


def command_lines() -> list[tuple[str, str]]:
    """(page, command line) of each call of Onward's own commands."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        for block in _BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.replace("\\\n", " ").splitlines():
                start = re.match(r"(?:torchrun .*?-m )?(onward [a-z-]+ .*)", line)
                if start is not None:
                    found.append((str(page.relative_to(ROOT)), start[1]))
    return found


def test_every_page_with_programs_is_executed() -> None:
    pages = {str(page.relative_to(ROOT)) for page in PAGES}
    with_programs = {page for page in pages if programs_of(page)}
    notes = {page for page in with_programs if page.startswith("docs/notes/")}
    of_a_trainer = {str(page.relative_to(ROOT)) for page in OF_A_TRAINER}
    assert with_programs - notes - of_a_trainer == set(EXECUTED)
    for page, test in EXECUTED.items():
        folder, _, name = page.removeprefix("docs/").rpartition("/")
        text = (ROOT / test).read_text(encoding="utf-8")
        assert (folder or name) in text, f"{test} does not name {page}"


@pytest.mark.parametrize("page", OF_A_TRAINER, ids=lambda page: page.stem)
def test_options_of_meshes_are_the_trainers(page: Path) -> None:
    """Each dict of options makes options; each call is of a method with these arguments."""
    found = programs_of(str(page.relative_to(ROOT)))
    assert found
    for program in found:
        for statement in ast.parse(program).body:
            if isinstance(statement, ast.Assign):
                assert onward.TrainerOptions(**ast.literal_eval(statement.value)).mesh
            else:
                assert isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
                call = statement.value
                assert isinstance(call.func, ast.Attribute)
                method = getattr(onward.Trainer, call.func.attr)
                inspect.signature(method).bind(None, *call.args)


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """The options of each command, by its `--help`; filled as it is asked for."""
    return {}


@pytest.mark.parametrize(("page", "line"), command_lines())
def test_options_of_command_lines_exist(
    page: str, line: str, options: dict[str, set[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    _, verb, *words = shlex.split(line, comments=True)
    if verb not in options:
        assert main([verb, "--help"]) == 0
        options[verb] = set(_OPTION.findall(capsys.readouterr().out))
    ours = words[: words.index("--")] if "--" in words else words
    named = {_OPTION.match(word)[1] for word in ours if word.startswith("--")}  # type: ignore[index]
    assert named <= options[verb] | {"model", "eval_file"}, page  # both are aliases


def test_programs_about_explanations(tmp_path: Path) -> None:
    made = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    batch = (torch.randn(4, 8), torch.randint(0, 3, (4,)))
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-3)
    names: dict[str, Any] = {"onward": onward, "json": __import__("json"), "batch": batch}
    [program] = programs_of("docs/explain.md")
    *trainer_lines, loop_line, rest = program.split("\n", 3)
    assert all("(trainer, " in line for line in trainer_lines)
    names["trainer"] = onward.Trainer(made, optimizer, torch.nn.functional.cross_entropy)
    for line in trainer_lines:
        exec(line, names)
        assert names["found"].captured and names["found"].memory is not None
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    onward.accelerate(model)
    model(batch[0]).sum().backward()
    own = torch.optim.AdamW(model.parameters(), lr=1e-3)
    names |= {"model": model, "optimizer": own, "batch": batch[0]}
    exec(f"{loop_line}\n{rest}", names)
    assert names["found"].captured


_BEFORE = """
import os
from pathlib import Path
import torch
import onward
from transformers import GPT2Config, GPT2LMHeadModel

torch.set_num_threads(1)
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

def batch_of(step, rank):
    drawn = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(0, 64, (2, 8), generator=drawn)
    return {"input_ids": ids, "labels": ids}

loader = [batch_of(n, rank) for n in range(3 - rank)]  # the second rank has fewer

samples = [
    dict(zip(batch_of(n, 0), row)) for n in range(16) for row in zip(*batch_of(n, 0).values())
]
others, options = samples[:8], {"max_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
compute_metrics = lambda found: {"rows": len(found.predictions)}
"""
_AFTER = """
names = sorted(p.name for p in Path("out").iterdir())
os.write(1, f"{rank} {trainer.updates} {names}\\n".encode())  # whole lines of two processes
torch.distributed.destroy_process_group()
"""


def test_the_program_about_gpus_also_runs_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    [program] = programs_of("docs/gpu.md")
    small = program.replace("n_layer=2, n_embd=128", "n_layer=1, n_embd=16")
    assert small != program
    exec(compile(small, "docs/gpu.md", "exec"), {})
    assert len([float(line) for line in capsys.readouterr().out.splitlines()]) == 3


def test_programs_about_ranks_run_on_two(tmp_path: Path) -> None:
    parts = programs_of("docs/distributed.md")
    assert len(parts) == 5
    parts[-1] = parts[-1].replace("10_000", "8").replace("500", "2")
    program = tmp_path / "program.py"
    program.write_text("\n".join([_BEFORE, *parts, _AFTER]), encoding="utf-8")
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone",
            str(program),
        ],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    told = sorted(line for line in done.stdout.splitlines() if line[:2] in ("0 ", "1 "))
    assert [line.split(" ")[1] for line in told] == ["8", "8"], done.stdout
    assert "checkpoint-6" in told[0] and "checkpoint-8" in told[0], "two newest are kept"
