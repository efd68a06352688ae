"""Runs transformers' own tests of its Trainer, from a checkout that a tester has, on three sides.

What differs is a test that passes with transformers' Trainer and does not with the one in its place
(`drop-in`), or with an accelerated model in transformers' own (`accelerated`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import transformers

HERE = Path(__file__).resolve().parent
FILES = (
    "test_trainer.py", "test_trainer_callback.py", "test_trainer_seq2seq.py",
    "test_trainer_checkpointing.py", "test_trainer_data.py", "test_trainer_evaluation.py",
    "test_trainer_optimizers.py", "test_trainer_resume.py", "test_trainer_hyperparameter.py",
    "test_gradient_clipping.py", "test_loss_reduction.py", "test_trainer_optimizer_skip.py",
)  # fmt: skip
LIMIT = 1800.0  # seconds for one file on one side
Outcomes = dict[str, tuple[str, str]]  # by test: the outcome, what it said


def files_of(path: Path) -> list[Path]:
    """The files of tests below a checkout, or in the folder of tests itself. Raises ValueError."""
    for folder in (path / "tests" / "trainer", path):
        found = [folder / name for name in FILES if (folder / name).exists()]
        if found:
            return found
    raise ValueError(
        f"{path} has no tests/trainer/{FILES[0]}; fix: --transformers-tests a checkout of "
        f"transformers {transformers.__version__}, or its folder tests/trainer"
    )


def outcomes(file: Path, side: str, only: str = "", limit: float = LIMIT) -> Outcomes:
    """The outcome of each test of one file on one side; a test at which the process ends is
    `ended`."""
    root = file.parents[2] if file.parent.name == "trainer" else file.parent
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        log.touch()
        environment = {
            **os.environ, "OUTSIDERS_SIDE": side, "OUTSIDERS_LOG": str(log), "HF_HUB_OFFLINE": "1",
            "PYTHONDONTWRITEBYTECODE": "1", "TRANSFORMERS_VERBOSITY": "error",
            "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(
                [str(HERE), str(HERE.parents[1] / "src"), os.environ.get("PYTHONPATH", "")]
            ),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-p", "foreign_trainer", "-q", "-c", os.devnull,
            "--rootdir", str(root), "-p", "no:cacheprovider", "-p", "no:xdist",
            *(["-k", only] if only else []), str(file.relative_to(root)),
        ]  # fmt: skip
        try:
            done = subprocess.run(
                command, cwd=root, env=environment, capture_output=True, text=True, timeout=limit
            )
        except subprocess.TimeoutExpired:
            done = None
        found = {}
        for line in log.read_text().splitlines():
            told = json.loads(line)
            found[told["test"]] = (told["outcome"], told["said"])
        if not found and (done is None or done.returncode not in (0, 5)):
            said = "no end" if done is None else (done.stdout + done.stderr)[-600:]
            raise ValueError(f"{file.name} does not run with {side}: {said}")
    return found


def differences(stock: Outcomes, ours: Outcomes) -> dict[str, str]:
    """By test that passes in stock alone: what it says on our side."""
    found = {}
    for test, (outcome, _) in stock.items():
        mine, said = ours.get(test, ("not run", "the process ended before it"))
        if outcome == "passed" and mine != "passed":
            found[test] = f"{mine}: {said}"
    return found
