"""A second run of the command begins from what the first one has kept, whatever its folder, rate
and steps are; another model does not."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from onward.recipes.describe import describe
from onward.recipes.loop import Job
from onward.recipes.options import FinetuneConfig

SMALL = (
    "--corpus_bytes", "300000", "--vocab_size", "300", "--block_size", "16", "--max_eval_samples",
    "4", "--save_strategy", "no", "--config_overrides",
)  # fmt: skip


@pytest.mark.slow
def test_captures_are_kept_for_other_folders_and_rates(tmp_path: Path) -> None:
    def compiled(number: int, overrides: str, *more: str) -> str:
        """What the first line about compiling names."""
        words = ["finetune", *SMALL, overrides, "--output_dir", str(tmp_path / str(number)), *more]
        done = subprocess.run(
            [sys.executable, "-m", "onward", *words], capture_output=True, text=True, check=False,
            env={**os.environ, "ONWARD_CACHE": str(tmp_path), "ONWARD_GRAPH_CACHE": "1"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stderr.splitlines() if "compiled in" in line]
        return lines[0].replace("capture cache", "")

    assert "capture " in compiled(1, "n_embd=32,n_head=2", "--max_steps", "1")
    again = compiled(2, "n_embd=32,n_head=2", "--max_steps", "2", "--learning_rate", "0.5")
    assert "capture " not in again
    assert "capture " in compiled(3, "n_embd=32,n_head=4", "--max_steps", "1")


def test_a_job_names_its_model_and_not_its_folder(tmp_path: Path) -> None:
    """The name is part of what a kept capture is of."""
    config = FinetuneConfig(corpus_bytes=300_000, vocab_size=300, block_size=16, max_steps=1)
    job = describe(config).job
    job.save(tmp_path)
    assert Job.load(tmp_path).model_config.name_or_path == job.model_config.name_or_path == ""
