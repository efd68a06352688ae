"""The output folder of a run: one run's alone, known again, and removed where nothing is in it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from onward.recipes.options import FinetuneConfig, InputError, check_output_dir
from onward.recipes.run_folder import (
    FREE_OPTIONS,
    RunFolder,
    cut_metrics,
    differences,
    publish_json,
    read_record,
    write_json,
)
from onward.recipes.task_switches import SWITCH_TASKS
from onward.recipes.weights_digest import weights_sha256

OTHER: dict[str, Any] = {
    "model_name_or_path": "gpt2-small", "tokenizer_name": "t", "vocab_size": 300, "corpus_bytes": 9,
    "block_size": 16, "max_eval_samples": 3, "engine": "torch", "compare": True,
    "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 3, "max_steps": 7, "learning_rate": 0.5,
    "lr_scheduler_type": "cosine", "warmup_steps": 2, "weight_decay": 0.5, "max_grad_norm": None,
    "bf16": True, "fp16": True, "tf32": True, "export_dtype": "float16", "dropout": 0.5, "seed": 1,
    "logging_steps": 3, "mesh": "dp_replicate=2", "optimizer_state": "bf16",
    "config_overrides": "n_layer=1", "max_train_samples": 9, "warmup_ratio": 0.5, "adam_beta1": 0.8,
    "adam_beta2": 0.9, "adam_epsilon": 1e-6, "task": "masked-lm", "optim": "lamb",
    "lora_r": 4, "lora_alpha": 4, "lora_dropout": 0.1, "lora_target_modules": "all-linear",
    "text_column": "a",
    "label_column": "b", "max_seq_length": 9, "max_target_length": 9, "source_prefix": "c",
    "source_lang": "d", "target_lang": "e",
    "doc_stride": 9,
    "mlm_probability": 0.5, "mean_span_length": 2.0, "predict_with_generate": True,
    "generation_num_beams": 2, "load_best_model_at_end": True, "metric_for_best_model": "f1",
    "greater_is_better": True, "early_stopping_patience": 2, "towers": "separate", "pooling": "cls",
    "crossing": "residual", "teacher_model": "t", "packing": False, "skip_nonfinite": False,
}  # fmt: skip


def record(**options: Any) -> dict[str, Any]:
    return {
        "options": dataclasses.asdict(FinetuneConfig(**options)),
        "texts": [{"sha256": "a"}],
        "blocks_sha256": "b",
        "model_config_sha256": "c",
    }


def checkpoint(folder: Path, updates: int = 1) -> Path:
    from checkpoint_faults import checkpoint as made

    path = folder / f"checkpoint-{updates}"
    made(updates).packed().write(path)
    return path


def test_every_option_is_free_or_makes_another_run() -> None:
    names = {field.name for field in dataclasses.fields(FinetuneConfig)}
    assert set(OTHER) | FREE_OPTIONS == names and not set(OTHER) & FREE_OPTIONS
    for name, value in OTHER.items():
        # the model by default follows the task
        task = SWITCH_TASKS.get(name, ("causal-lm",))[0]
        given = {"task": task, "model_name_or_path": "gpt2-tiny"}
        [line] = differences(record(**given), record(**{**given, name: value}))
        assert line.startswith(f"--{name} ") and line.endswith(" here")


def test_an_option_that_a_task_does_not_have_tells_no_runs_apart() -> None:
    """A default may be another in the version that a run began with."""
    older = record()
    older["options"]["max_target_length"] = 64
    assert differences(older, record()) == []
    written = record(task="seq2seq-lm")
    written["options"]["max_target_length"] = 64
    [line] = differences(written, record(task="seq2seq-lm"))
    assert line == "--max_target_length 64 there, null here"


def test_contents_make_another_run() -> None:
    texts = {"texts": [{"sha256": "x"}], "blocks_sha256": "y", "model_config_sha256": "z"}
    assert differences(record(), {**record(), **texts}) == ["another text in --train_file"]
    more = [{"sha256": "a"}, {"sha256": "b"}]
    assert differences(record(), {**record(), "texts": more}) == [
        "another text in --validation_file"
    ]
    [tokens] = differences(record(), {**record(), "blocks_sha256": "x"})
    assert "another tokenizer" in tokens
    [config] = differences(record(), {**record(), "model_config_sha256": "x"})
    assert "another config.json" in config
    moved = record(train_file="elsewhere.txt", memory_budget=0.5, save_steps=3)
    assert differences(record(), moved) == []
    older = record()
    del older["options"]["seed"]  # of a version without that option
    assert differences(older, record()) == []


def test_the_same_run_is_known_again_and_another_is_refused(tmp_path: Path) -> None:
    final = tmp_path / "a" / "b"
    with RunFolder(final) as folder:
        folder.begin(record(), overwrite=False)
        (final / "metrics.jsonl").write_text('{"step": 1}\n')
        checkpoint(final)
        assert not folder.is_complete
    with RunFolder(final) as folder:
        folder.begin(record(save_steps=2), overwrite=False)
        assert (final / "metrics.jsonl").read_text() and folder.newest == final / "checkpoint-1"
    before = sorted(final.rglob("*"))
    with pytest.raises(InputError, match="--seed 42 there, 1 here"), RunFolder(final) as folder:
        folder.begin(record(seed=1), overwrite=False)
    assert sorted(final.rglob("*")) == before and folder.kept is None
    publish_json(final, "eval_results.json", {})
    with RunFolder(final) as folder:
        folder.begin(record(), overwrite=False)
        assert folder.is_complete


def test_a_damaged_record_and_another_process_are_refused(tmp_path: Path) -> None:
    with RunFolder(tmp_path / "a") as folder:
        folder.begin(record(), overwrite=False)
        with (
            pytest.raises(InputError, match="another process trains in"),
            RunFolder(tmp_path / "a"),
        ):
            pass
    (tmp_path / "a" / "run_config.json").write_text('{"options": {}')
    with pytest.raises(InputError, match="cannot be read"):
        read_record(tmp_path / "a")
    (tmp_path / "a" / "run_config.json").write_text("[" * 100_000)  # Python's recursion
    with pytest.raises(InputError, match=r"run_config\.json' cannot be read"):
        read_record(tmp_path / "a")


def test_what_a_run_wrote_is_replaced_on_request_and_nothing_else(tmp_path: Path) -> None:
    final = tmp_path / "a"
    with RunFolder(final) as folder:
        folder.begin(record(compare=True), overwrite=False)
        checkpoint(final, 1)
        damaged = checkpoint(final, 2) / "manifest.json"
        damaged.write_bytes(damaged.read_bytes()[:-9])
        (final / "torch").mkdir()
        for name in ("metrics.jsonl", "model.safetensors", "model.onnx", "torch/metrics.jsonl"):
            (final / name).write_text("x")
        publish_json(final, "eval_results.json", {})
        (final / "mine.txt").touch()
    with RunFolder(final) as folder:
        folder.begin(record(seed=1), overwrite=True)
        assert not folder.is_complete
    assert {path.name for path in final.iterdir()} == {"run_config.json", "mine.txt"}
    assert read_record(final)["options"]["seed"] == 1


@pytest.mark.parametrize("compare", [False, True])
def test_a_folder_named_torch_is_removed_as_far_as_a_comparison_wrote_it(
    compare: bool, tmp_path: Path
) -> None:
    final = tmp_path / "a"
    with RunFolder(final) as folder:
        folder.begin(record(compare=compare), overwrite=False)
    (final / "torch" / ".files.77-0123abcd").mkdir(parents=True)
    for name in ("metrics.jsonl", "eval_results.json", "mine.py"):
        (final / "torch" / name).write_text("x")
    with RunFolder(final) as folder:
        folder.begin(record(compare=compare, seed=1), overwrite=True)
    left = {path.name for path in (final / "torch").iterdir() if path.is_file()}
    assert left == {"mine.py"} | (set() if compare else {"metrics.jsonl", "eval_results.json"})
    assert (final / "torch" / ".files.77-0123abcd").exists() != compare


def test_a_damaged_record_removes_no_folder_named_torch(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "metrics.jsonl").touch()
    (tmp_path / "run_config.json").write_text("{")
    with RunFolder(tmp_path) as folder:
        folder.begin(record(), overwrite=True)
    assert (tmp_path / "torch" / "metrics.jsonl").exists()


def test_leaves_nothing_after_an_error_and_keeps_older_folders(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for path in (tmp_path / "old" / "a" / "b", tmp_path / "old"):
        with pytest.raises(ZeroDivisionError), RunFolder(path) as folder:
            folder.begin(record(), overwrite=False)
            (path / "metrics.jsonl").touch()
            raise ZeroDivisionError
        assert list(tmp_path.rglob("*")) == [tmp_path / "old"]


@pytest.mark.parametrize("kept", ["model.safetensors", "checkpoint-1"])
def test_keeps_what_was_saved_before_an_error(kept: str, tmp_path: Path) -> None:
    output = RunFolder(tmp_path / "a")
    with pytest.raises(ZeroDivisionError), output as folder:
        folder.begin(record(), overwrite=False)
        if kept.startswith("model"):
            (folder.path / kept).touch()
        else:
            checkpoint(folder.path)
        raise ZeroDivisionError
    assert output.kept == tmp_path / "a" and (tmp_path / "a" / kept).exists()


def test_never_takes_a_folder_with_other_files(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "theirs").touch()
    for overwrite in (False, True):
        with pytest.raises(InputError, match="not empty"), RunFolder(tmp_path / "a") as folder:
            folder.begin(record(), overwrite)
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["theirs"]


def test_takes_a_folder_in_which_a_run_was_killed_at_its_first_file(tmp_path: Path) -> None:
    (tmp_path / ".files.77-0123abcd").mkdir()
    (tmp_path / ".files.77-0123abcd" / "run_config.json").write_text("{")
    check_output_dir(tmp_path)
    with RunFolder(tmp_path) as folder:
        folder.begin(record(), overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["run_config.json"]


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"step": 2}\n{"step": 4}\n{"step": 6}\n', 2),
        ('{"step": 2}\n{"step": 4}', 1),  # cut within its last line
        ('{"step": 2}\n{"st\n{"step": 4}\n', 1),
        ('{"step": 9}\n', 0),
        ("", 0),
    ],
)
def test_metrics_end_at_the_step_that_a_run_goes_on_from(
    text: str, kept: int, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    for target in (tmp_path / "other.jsonl", path):
        cut_metrics(path, target, 5)
        assert target.read_text() == "".join(text.splitlines(keepends=True)[:kept])
    cut_metrics(tmp_path / "missing", tmp_path / "new", 5)
    assert (tmp_path / "new").read_bytes() == b""
    assert len(list(tmp_path.iterdir())) == 3


def test_json_has_no_nan(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"loss": float("nan")})
    with pytest.raises(ValueError, match="not JSON compliant"):
        publish_json(tmp_path, "y.json", {"loss": float("nan")})
    assert not list(tmp_path.iterdir())


def test_what_is_published_replaces_a_file_whole(tmp_path: Path) -> None:
    publish_json(tmp_path, "x.json", {"a": 1})
    publish_json(tmp_path, "x.json", {"a": 2})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 2}
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_the_digest_of_weights_is_that_of_runs_before() -> None:
    """Runs keep it, and are compared by it when they go on; another value would be another start.
    Beside the bytes as numpy has them, in the order of the keys."""

    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(12.0).view(3, 4).t())
            self.low = nn.Parameter(torch.arange(5.0).bfloat16())
            self.register_buffer("step", torch.tensor(7))
            self.register_buffer("mask", torch.tensor([True, False]))
            self.register_buffer("none", torch.zeros(0, 3))

    model = Held()
    model.other = model.weight  # tied: counted under each of its keys
    state = model.state_dict()
    assert list(state) == ["weight", "low", "other", "step", "mask", "none"]
    wanted = hashlib.sha256()
    for key, tensor in state.items():
        plain = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        wanted.update(key.encode() + plain.numpy().tobytes())
    kept = "341994843c673097645b6b98f40fd6043fb0ba569ec177333687c2a3660fef6d"
    assert weights_sha256(model) == wanted.hexdigest() == kept
