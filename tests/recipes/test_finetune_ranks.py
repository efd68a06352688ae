"""`onward finetune` on two processes is the run of one process with twice the batch: losses,
weights, evaluation, also where it was stopped; what cannot be right is refused once."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_ranks_program import RANKS, STOPPED_AT, run
from safetensors.torch import load_file

from onward.cli import main
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.run_ranks import RunRanks, sizes_of, with_mesh

SIZE, STEPS = 2, 6
# the keys' bias, whose gradient is nothing but rounding, which AdamW makes large
ROUNDED = "attn.c_attn.bias"


def words(model: Path, text: Path, folder: Path, size: int, *more: str) -> list[str]:
    """A command line with dropout, accumulation and checkpoints."""
    return [
        *("finetune", "--model", str(model), "--train_file", str(text), "--block_size", "32"),
        *("--output_dir", str(folder), "--max_steps", str(STEPS), "--logging_steps", "2"),
        *("--per_device_train_batch_size", str(size), "--gradient_accumulation_steps", "2"),
        *("--per_device_eval_batch_size", "1", "--dropout", "0.2", "--learning_rate", "1e-3"),
        *("--max_eval_samples", "3", "--save_total_limit", "1", *more),
    ]


@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_batch(
    tmp_path: Path, text: str, model_folder: Path
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(text[:1600], encoding="utf-8")
    for rank in range(RANKS):
        (tmp_path / f"text{rank}.txt").write_text(text[rank : 900 + rank], encoding="utf-8")
    whole, parts, cut = tmp_path / "whole", tmp_path / "parts", tmp_path / "cut"
    one = words(model_folder, file, whole, SIZE * RANKS)
    assert main(one) == 0

    two = words(model_folder, file, parts, SIZE)
    other = tmp_path / "textRANK.txt"
    found = run(
        tmp_path,
        {
            "stopped": two,
            "again": [*two, "--mesh", "auto"],
            "complete": [*two, "--mesh", "dp_replicate=2"],
            "zero": words(model_folder, file, cut, SIZE, "--zero", "1"),
            "other mesh": [*two, "--zero", "1"],
            "texts": words(model_folder, other, tmp_path / "texts", SIZE),
            "compare": [*words(model_folder, file, tmp_path / "compare", SIZE), "--compare"],
            "unknown": [*two, "--meshes", "2"],
        },
    )
    for name, said in found.items():
        for status, *printed in said[1:]:
            assert status == 2 or printed == ["", ""], f"{name}: rank 0 alone prints"
    assert [status for status, *_ in found["stopped"]] == [143, 143]
    assert (
        f"saved in {parts}/checkpoint-{STOPPED_AT}; to go on: torchrun " in found["stopped"][0][2]
    )
    for name in ("again", "complete", "zero"):
        assert [status for status, *_ in found[name]] == [0, 0], found[name]
    assert f"goes on from {parts}/checkpoint-{STOPPED_AT}" in found["again"][0][2]
    assert "mesh       dp_replicate=2: each process trains 2" in found["again"][0][1]
    assert "nothing is left to do" in found["complete"][0][1]
    for folder in (parts, cut):
        assert_same_run(folder, whole)
        assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]

    for name, told in (
        ("other mesh", "--mesh dp_replicate=2 there, dp_shard=2 here"),
        ("texts", "rank 1 has read another text or tokenizer than rank 0"),
        ("compare", "eager PyTorch trains in one process, and 2 are started, in --compare"),
        ("unknown", "unknown option --meshes"),
    ):
        assert [status for status, *_ in found[name]] == [2, 2], found[name]
        errors = [err for *_, err in found[name]]
        assert sum(err.count("error: ") for err in errors) == 1 and told in "".join(errors), errors
    assert not (tmp_path / "texts").exists() and not (tmp_path / "compare").exists()


def assert_same_run(found: Path, want: Path) -> None:
    """Asserts that two runs have the same losses and weights."""
    runs = [(f / "metrics.jsonl").read_text().splitlines() for f in (found, want)]
    assert len(runs[0]) == len(runs[1]) == STEPS // 2
    for mine, theirs in zip(*(map(json.loads, lines) for lines in runs), strict=True):
        assert (mine["step"], mine["epoch"]) == (theirs["step"], theirs["epoch"])
        for key in ("loss", "grad_norm", "learning_rate"):
            assert math.isclose(mine[key], theirs[key], rel_tol=1e-6), (key, mine, theirs)
    losses = [json.loads((f / "eval_results.json").read_text())["eval_loss"] for f in (found, want)]
    assert math.isclose(*losses, rel_tol=1e-6)
    weights = [load_file(f / "model.safetensors") for f in (found, want)]
    names = [name for name in weights[1] if ROUNDED not in name]
    a, b = (torch.cat([w[name].double().reshape(-1) for name in names]) for w in weights)
    assert float((a - b).norm() / b.norm()) < 1e-6


@pytest.mark.parametrize(
    ("options", "ranks", "mesh"),
    [
        ({}, 1, None),
        ({"mesh": "auto"}, 1, None),
        ({"mesh": "dp_replicate=1"}, 1, None),
        ({}, 4, "dp_replicate=4"),
        ({"zero": 2}, 4, "dp_shard=4"),
        ({"mesh": "dp_replicate=2, dp_shard=2", "zero": 1}, 4, "dp_replicate=2,dp_shard=2"),
    ],
)
def test_meshes_that_are_asked_for(options: dict[str, Any], ranks: int, mesh: str | None) -> None:
    assert with_mesh(FinetuneConfig(**options), ranks).mesh == mesh


@pytest.mark.parametrize(
    ("options", "ranks", "told"),
    [
        ({"mesh": "dp_replicate=2"}, 1, "needs 2 processes, and one process is started"),
        ({"mesh": "dp_replicate=2,dp_shard=2"}, 2, "fix: torchrun --nproc-per-node=4 -m onward "),
        ({"mesh": "dp_replicate=1"}, 2, "needs 1 processes, and 2 processes are started"),
        ({"zero": 1}, 1, "needs 2 processes, and one process is started"),
        ({"zero": 1, "mesh": "dp_replicate=2"}, 2, "along dp_shard, of which there is one"),
        ({"engine": "torch"}, 2, "in --engine"),
        ({"compare": True}, 2, "in --compare"),
        *(({"mesh": mesh}, 2, "in --mesh; fix: write ranks by axis") for mesh in (
            "", "2", "dp_replicate", "tp=2", "dp_replicate=0", "dp_replicate=2,", "dp_replicate=x",
            "dp_replicate=1,dp_replicate=2", "Auto", "dp_shard=-2", "dp_replicate=2 dp_shard=1",
        )),
    ],
)  # fmt: skip
def test_meshes_that_are_refused(options: dict[str, Any], ranks: int, told: str) -> None:
    with pytest.raises(InputError) as error:
        with_mesh(FinetuneConfig(**options), ranks)
    assert told in str(error.value) and "; fix: " in str(error.value)


@pytest.mark.parametrize(
    "words", ["--mesh dp_replicate=2", "--zero 1", "--mesh dp_shard=2 --zero 2"]
)
def test_several_ranks_need_torchrun(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("finetune", "verify"):
        assert main([verb, *words.split()]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "fix: " in said
        assert ("torchrun --nproc-per-node=2 -m onward finetune" in said) == (verb == "finetune")


def test_each_rank_takes_its_own_rows_of_each_micro_batch() -> None:
    batch = torch.arange(12).view(12, 1)
    parts = [RunRanks(rank, 3).shares(batch, 2) for rank in range(3)]
    for micro in range(2):
        rows = torch.cat([part[micro] for part in parts])
        assert torch.equal(rows, batch[6 * micro : 6 * micro + 6])
    assert sizes_of("dp_shard=2") == {"dp_shard": 2} and sizes_of(None) is None
