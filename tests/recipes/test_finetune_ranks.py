"""`onward finetune` on several processes is the run of one process with the whole batch: losses,
weights, evaluation, whatever the ranks share, also where it was stopped and goes on along another
mesh; what cannot be right is refused once."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from finetune_ranks_program import RANKS, STOPPED_AT, RankSaid, run
from safetensors.torch import load_file

from onward.cli import main
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.run_folder import differences
from onward.recipes.run_ranks import RunRanks
from onward.recipes.trainer_switches import shares_of, sizes_of, with_mesh

SIZE, STEPS = 2, 6
# the keys' bias, whose gradient is nothing but rounding, which AdamW makes large
ROUNDED = "attn.c_attn.bias"
NOISE = 8  # other numbers of weights whose gradient may be so


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
            "other batch": words(model_folder, file, parts, SIZE + 1),
            "texts": words(model_folder, other, tmp_path / "texts", SIZE),
            "compare": [  # without checkpoints, which a comparison has not
                *words(model_folder, file, tmp_path / "compare", SIZE)[:-2],
                "--compare",
            ],
            "unknown": [*two, "--meshes", "2"],
        },
    )
    assert_rank_0_alone_prints(found)
    assert [said.status for said in found["stopped"]] == [143, 143]
    assert (
        f"saved in {parts}/checkpoint-{STOPPED_AT}; to go on: torchrun " in found["stopped"][0].err
    )
    for name in ("again", "complete", "zero", "other mesh"):
        assert [said.status for said in found[name]] == [0, 0], found[name]
    assert f"goes on from {parts}/checkpoint-{STOPPED_AT}" in found["again"][0].err
    assert "mesh       dp_replicate=2: each process trains 2" in found["again"][0].out
    for name in ("complete", "other mesh"):
        assert "nothing is left to do" in found[name][0].out
    for folder in (parts, cut):
        assert_same_run(folder, whole)
        assert [path.name for path in folder.glob("checkpoint-*")] == [f"checkpoint-{STEPS}"]

    for name, told in (
        ("other batch", "--per_device_train_batch_size make 8 sequences an update there, 12 here"),
        ("texts", "rank 1 has a different text or tokenizer than rank 0"),
        ("compare", "eager PyTorch trains in one process, and 2 are started, in --compare"),
        ("unknown", "unknown option --meshes"),
    ):
        assert_refused_once(found[name], told)
    assert not (tmp_path / "texts").exists() and not (tmp_path / "compare").exists()


@pytest.mark.slow
def test_ranks_learn_other_tasks_as_one_process_does(tmp_path: Path) -> None:
    rows = [
        {
            "text": f"def name{i % 7}(" + "x, " * (i % 5) + "y)", "label": "ab"[i % 2],
            "tokens": ["def", f"name{i}", "x"][: 1 + i % 3], "tags": ["K", "N", "N"][: 1 + i % 3],
        }
        for i in range(24)
    ]  # fmt: skip
    table = tmp_path / "rows.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def of(task: str, folder: Path, size: int, *more: str) -> list[str]:
        narrow = "hidden_size=32,num_attention_heads=2,intermediate_size=48"
        return [
            *("finetune", "--task", task, "--train_file", str(table), "--vocab_size", "300"),
            *("--config_overrides", narrow, "--max_steps", "3", "--dropout", "0.1", "--optim"),
            *("sgd", "--learning_rate", "0.1", "--per_device_train_batch_size", str(size)),
            *("--gradient_accumulation_steps", "2", "--validation_file", str(table)),
            *("--per_device_eval_batch_size", "5", "--save_strategy", "no", "--output_dir"),
            *(str(folder), *more),
        ]

    cases = {
        "text-classification": ("--mesh", "dp_replicate=2"),
        "token-classification": ("--mesh", "dp_shard=2", "--zero", "1"),
    }
    commands = {
        task: of(task, tmp_path / f"parts {task}", 2, *mesh) for task, mesh in cases.items()
    }
    commands["tp"] = of("text-classification", tmp_path / "parts tp", 4, "--mesh", "tp=2")
    found = run(tmp_path, commands)
    for name, said in found.items():
        assert [each.status for each in said] == [0, 0], said
        task = name if name in cases else "text-classification"
        whole = tmp_path / f"whole {name}"
        assert main(of(task, whole, 4)) == 0
        results = [
            json.loads((folder / "eval_results.json").read_text())
            for folder in (tmp_path / f"parts {name}", whole)
        ]
        for key in ("eval_loss", "train_loss", "accuracy", "f1_macro"):
            assert results[0][key] == pytest.approx(results[1][key], rel=2e-6), (name, key)


@pytest.mark.slow
def test_ranks_see_and_hear_as_one_process_does(tmp_path: Path) -> None:
    narrow = {
        "image-classification": "hidden_size=32,num_attention_heads=2,intermediate_size=48",
        "automatic-speech-recognition": "d_model=32,encoder_attention_heads=2,encoder_ffn_dim=48,"
        "decoder_attention_heads=2,decoder_ffn_dim=48",
    }

    def of(task: str, folder: Path, size: int, *more: str) -> list[str]:
        return [
            *("finetune", "--task", task, "--config_overrides", narrow[task], "--max_steps", "3"),
            *("--max_train_samples", "24", "--max_eval_samples", "7", "--optim", "sgd"),
            *("--learning_rate", "0.1", "--per_device_train_batch_size", str(size)),
            *("--corpus_bytes", "700000", "--save_strategy", "no", "--output_dir", str(folder)),
            *more,
        ]

    meshes: dict[str, tuple[str, ...]] = {
        "image-classification": ("dp_replicate=2", "tp=2"),
        "automatic-speech-recognition": ("dp_shard=2",),
    }
    commands = {
        f"{task} {mesh}": of(
            task, tmp_path / f"{task} {mesh}", 4 if mesh == "tp=2" else 2, "--mesh", mesh
        )
        for task, each in meshes.items()
        for mesh in each
    }
    found = run(tmp_path, commands)
    for task, each in meshes.items():
        whole = tmp_path / f"{task} whole"
        assert main(of(task, whole, 4)) == 0
        wanted = json.loads((whole / "eval_results.json").read_text())
        for mesh in each:
            name = f"{task} {mesh}"
            assert [one.status for one in found[name]] == [0, 0], found[name]
            results = json.loads((tmp_path / name / "eval_results.json").read_text())
            for key in ("eval_loss", "train_loss"):
                assert results[key] == pytest.approx(wanted[key], rel=2e-6), (name, key)


# by the folder of a run: the switches of its mesh, the number of processes along axes of data, and
# those of the mesh on which it goes on after it was stopped, if it was
OF_TWO: dict[str, tuple[str, int, str, int]] = {
    "zero 3": ("--zero 3", 2, "--mesh tp=2", 1),
    "tp": ("--mesh tp=2", 1, "--mesh dp_replicate=2", 2),
    "cp": ("--mesh cp=2", 1, "", 0),
    "pp": (
        "--mesh pp=2 --pipeline_schedule Interleaved1F1B --pipeline_microbatches 4", 1,
        "--mesh dp_shard=2 --zero 3", 2,
    ),
}  # fmt: skip
OF_FOUR: dict[str, tuple[str, int, str, int]] = {
    "zero 3 and tp": ("--mesh dp_shard=2,tp=2 --zero 3", 2, "--mesh dp_replicate=2,cp=2", 2),
    "replicas and tp": ("--mesh dp_replicate=2,tp=2", 2, "", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("runs", [OF_TWO, OF_FOUR], ids=["2", "4"])
def test_ranks_with_one_share_read_the_same_rows(
    tmp_path: Path, text: str, model_folder: Path, runs: dict[str, tuple[str, int, str, int]]
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(text[:1600], encoding="utf-8")
    rows, ranks = SIZE * RANKS, 2 if runs is OF_TWO else 4
    assert main(words(model_folder, file, tmp_path / "whole", rows)) == 0
    commands: dict[str, list[str]] = {}
    for name, (switches, shares, again, others) in runs.items():
        folder = tmp_path / name
        first = words(model_folder, file, folder, rows // shares, *switches.split())
        commands[f"stopped {name}" if again else name] = first
        if again:
            commands[name] = words(model_folder, file, folder, rows // others, *again.split())
    found = run(tmp_path, commands, ranks)
    assert_rank_0_alone_prints(found)
    for name, said in found.items():
        is_stopped = name.startswith("stopped")
        assert [each.status for each in said] == [143 if is_stopped else 0] * ranks, said
        if is_stopped:
            continue
        switches, _, again, _ = runs[name]
        if again:
            assert f"goes on from {tmp_path / name}/checkpoint-{STOPPED_AT}" in said[0].err
        last = (again or switches).split()
        mesh = sizes_of(last[1]) if last[0] == "--mesh" else {"dp_shard": 2}
        zero = int(last[last.index("--zero") + 1]) if "--zero" in last else 0
        cuts = zero == 3 or bool({"tp", "pp"} & set(mesh or {}))
        for each in said:
            assert (each.mesh, each.zero, each.has_parts) == (mesh, zero, cuts)
            assert each.is_whole, "the model has its weights when the command ends"
        assert_same_run(tmp_path / name, tmp_path / "whole")


def assert_rank_0_alone_prints(found: dict[str, list[RankSaid]]) -> None:
    """Asserts that other ranks have printed nothing, unless they say why they end."""
    for name, said in found.items():
        for each in said[1:]:
            assert each.status == 2 or (each.out, each.err) == ("", ""), name


def assert_refused_once(said: list[RankSaid], told: str) -> None:
    """Asserts that all ranks have ended with status 2, and one has said why."""
    assert {each.status for each in said} == {2}, said
    errors = [each.err for each in said]
    assert sum(err.count("error: ") for err in errors) == 1 and told in "".join(errors), errors


def assert_same_run(found: Path, want: Path) -> None:
    """Asserts that two runs have the same losses and weights."""
    runs = [(f / "metrics.jsonl").read_text().splitlines() for f in (found, want)]
    assert len(runs[0]) == len(runs[1]) == STEPS // 2
    for mine, theirs in zip(*(map(json.loads, lines) for lines in runs), strict=True):
        assert (mine["step"], mine["epoch"]) == (theirs["step"], theirs["epoch"])
        # weights may be 1e-6 apart, and a gradient changes faster than its weights
        for key, near in (("loss", 1e-6), ("grad_norm", 5e-6), ("learning_rate", 1e-6)):
            assert math.isclose(mine[key], theirs[key], rel_tol=near), (key, mine, theirs)
    losses = [json.loads((f / "eval_results.json").read_text())["eval_loss"] for f in (found, want)]
    assert math.isclose(*losses, rel_tol=1e-6)
    weights = [load_file(f / "model.safetensors") for f in (found, want)]
    names = [name for name in weights[1] if ROUNDED not in name]
    a, b = (torch.cat([w[name].double().reshape(-1) for name in names]) for w in weights)
    # AdamW makes large what single gradients that are nearly 0 have of rounding: three of 37,000
    apart, largest = (a - b).abs().sort().values.split([len(a) - NOISE, NOISE])
    assert float(apart.norm() / b.norm()) < 1e-6 and float(largest.max()) < 1e-4


@pytest.mark.parametrize(
    ("options", "ranks", "mesh"),
    [
        ({}, 1, None),
        ({"mesh": "auto"}, 1, None),
        ({"mesh": "dp_replicate=1"}, 1, None),
        ({}, 4, "dp_replicate=4"),
        ({"zero": 2}, 4, "dp_shard=4"),
        ({"mesh": "dp_replicate=2, dp_shard=2", "zero": 1}, 4, "dp_replicate=2,dp_shard=2"),
        ({"zero": 3}, 2, "dp_shard=2"),
        ({"mesh": "dp_shard=2,tp=2", "zero": 3}, 4, "dp_shard=2,tp=2"),
        ({"mesh": "dp_replicate=2,cp=2"}, 4, "dp_replicate=2,cp=2"),
        ({"mesh": "pp=4", "pipeline_microbatches": 8}, 4, "pp=4"),
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
        ({"zero": 4}, 2, "stage 1, 2 or 3 of ZeRO, or 0"),
        ({"mesh": "cp=3", "block_size": 64}, 3, "in --block_size; fix: give 66"),
        ({"mesh": "pp=2", "pipeline_microbatches": 9}, 2, "make no 9 micro-batches"),
        ({"mesh": "pp=2", "per_device_train_batch_size": 1}, 2, "fix: give 2 or more"),
        ({"engine": "torch"}, 2, "in --engine"),
        ({"compare": True}, 2, "in --compare"),
        *(({"mesh": mesh}, 2, "in --mesh; fix: write ranks by axis") for mesh in (
            "", "2", "dp_replicate", "ep=2", "dp_replicate=0", "dp_replicate=2,", "dp_replicate=x",
            "dp_replicate=1,dp_replicate=2", "Auto", "dp_shard=-2", "dp_replicate=2 dp_shard=1",
        )),
    ],
)  # fmt: skip
def test_meshes_that_are_refused(options: dict[str, Any], ranks: int, told: str) -> None:
    with pytest.raises(InputError) as error:
        with_mesh(FinetuneConfig(**options), ranks)
    assert told in str(error.value) and "; fix: " in str(error.value)


@pytest.mark.parametrize(
    "words", ["--mesh dp_replicate=2", "--zero 1", "--mesh dp_shard=2 --zero 2", "--mesh tp=2"]
)
def test_several_ranks_need_torchrun(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("finetune", "verify"):
        assert main([verb, *words.split()]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and "fix: " in said
        assert ("torchrun --nproc-per-node=2 -m onward finetune" in said) == (verb == "finetune")


def test_each_rank_takes_its_own_rows_of_each_micro_batch() -> None:
    parts = [RunRanks(rank, 3).shares(range(12), 2) for rank in range(3)]
    for micro in range(2):
        rows = [row for part in parts for row in part[micro]]
        assert rows == list(range(6 * micro, 6 * micro + 6))
    assert sizes_of("dp_shard=2") == {"dp_shard": 2} and sizes_of(None) is None
    assert [shares_of(mesh) for mesh in (None, "tp=4", "dp_shard=3,cp=2", "pp=2,tp=2")] == [
        1, 1, 3, 1,
    ]  # fmt: skip


def test_ranks_along_other_axes_have_the_rows_of_their_share() -> None:
    config = FinetuneConfig(mesh="dp_replicate=2,tp=3")
    all_ranks = [RunRanks(rank, 6).of(config) for rank in range(6)]
    for rank, ranks in enumerate(all_ranks):
        first, second = map(list, ranks.shares(range(12), 3))
        at = 3 * (rank // 3)  # the last axis has neighbours
        assert first == [at, at + 1, at + 2]
        assert second == [at + 6, at + 7, at + 8]
    assert all_ranks[0].has_parts
    places = [list(ranks.evaluates(3)) for ranks in all_ranks]
    assert places == [
        [(0, True), (2, True)], [(0, False), (2, False)], [(0, False), (2, False)],
        [(1, True), (2, False)], [(1, False), (2, False)], [(1, False), (2, False)],
    ]  # fmt: skip
    whole = [RunRanks(rank, 2).of(FinetuneConfig(mesh="cp=2")) for rank in range(2)]
    assert [list(ranks.evaluates(3)) for ranks in whole] == [[(0, True), (2, True)], [(1, True)]]


def recorded(**options: Any) -> dict[str, Any]:
    """What of a `run_config.json` tells runs apart."""
    same = {"texts": [], "blocks_sha256": "", "model_config_sha256": ""}
    return {"options": asdict(FinetuneConfig(**options)), **same}


def test_runs_are_the_same_where_their_updates_have_the_same_rows() -> None:
    one = recorded(per_device_train_batch_size=8, gradient_accumulation_steps=2)
    same = [
        recorded(per_device_train_batch_size=4, gradient_accumulation_steps=2, mesh="dp_shard=2"),
        recorded(per_device_train_batch_size=4, gradient_accumulation_steps=4, mesh="tp=2"),
        recorded(per_device_train_batch_size=2, gradient_accumulation_steps=4, zero=3,
                 mesh="dp_shard=2,tp=2"),
        recorded(per_device_train_batch_size=16, mesh="pp=2", pipeline_microbatches=8),
    ]  # fmt: skip
    for other in same:
        assert differences(one, other) == differences(other, one) == []
    told = differences(one, recorded(per_device_train_batch_size=8, mesh="dp_replicate=4"))
    assert len(told) == 1 and told[0].endswith("make 16 sequences an update there, 32 here")
    eager = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "engine": "torch"}
    assert len(differences(one, recorded(**eager))) == 3, "eager masks follow micro-batches"
    for name, odd in (("mesh", 5), ("mesh", "tp"), ("gradient_accumulation_steps", [2])):
        damaged = {**one, "options": {**one["options"], name: odd}}
        assert len(differences(damaged, one)) == 1, "a record that no run has written"
    assert len(differences(one, {**one, "options": {**one["options"], "later": 1}})) == 1
    before = {name: x for name, x in one["options"].items() if not name.startswith("pipeline")}
    assert differences({**one, "options": before}, one) == [], "of a version without the switches"
