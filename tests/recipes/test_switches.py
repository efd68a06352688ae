"""Command lines that people bring along: each switch is ours by another name, told to change
nothing, or refused with what to do instead. None is unknown, none is ignored in silence."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from onward.cli import main, parse
from onward.recipes.options import FinetuneConfig
from onward.recipes.switches import RENAMED, SWITCHES

# The command of ONNX Runtime's GPT-2 example, as its script gave it.
EXAMPLE = """
    --ort_trainer --output_dir=out/output-ort --model_type=gpt2-medium
    --model_name_or_path=gpt2-medium --tokenizer_name=gpt2-medium --config_name=gpt2-medium
    --do_eval --do_train --train_data_file=wiki.train.tokens --eval_data_file=wiki.test.tokens
    --per_gpu_train_batch_size=4 --per_gpu_eval_batch_size=4 --gradient_accumulation_steps=8
    --block_size=1024 --weight_decay=0.01 --overwrite_output_dir --logging_steps=100
    --num_train_epochs=5
"""
# What the arguments of that example's program, and of those after it, were called.
BROUGHT = """
    model_name_or_path model_type config_name tokenizer_name cache_dir train_data_file
    eval_data_file line_by_line mlm mlm_probability block_size overwrite_cache output_dir
    overwrite_output_dir do_train do_eval do_predict evaluate_during_training
    per_gpu_train_batch_size per_gpu_eval_batch_size per_device_train_batch_size
    per_device_eval_batch_size gradient_accumulation_steps learning_rate weight_decay adam_epsilon
    max_grad_norm num_train_epochs max_steps warmup_steps logging_dir logging_first_step
    logging_steps save_steps save_total_limit no_cuda seed fp16 fp16_opt_level local_rank
    tpu_num_cores ort_trainer world_rank world_size should_continue eval_all_checkpoints
    dataset_name dataset_config_name train_file validation_file max_train_samples max_eval_samples
    preprocessing_num_workers optim bf16 deepspeed report_to run_name save_strategy eval_strategy
    evaluation_strategy logging_strategy lr_scheduler_type warmup_ratio adam_beta1 adam_beta2
    gradient_checkpointing resume_from_checkpoint disable_tqdm dataloader_drop_last
    label_smoothing_factor use_cpu eval_steps task_name max_seq_length pad_to_max_length
    max_source_length max_target_length source_prefix text_column summary_column label_column
    doc_stride predict_with_generate group_by_length dataloader_num_workers
"""
FIELDS = {field.name: field for field in dataclasses.fields(FinetuneConfig)}
ACCEPTED = [name for name, switch in SWITCHES.items() if not switch.fix]
REFUSED = [name for name, switch in SWITCHES.items() if switch.fix]


def test_the_old_command_line_is_understood(capsys: pytest.CaptureFixture[str]) -> None:
    config = parse(EXAMPLE.split(), "finetune", FinetuneConfig)
    assert config == FinetuneConfig(
        output_dir="out/output-ort",
        model_name_or_path="gpt2-medium",
        tokenizer_name="gpt2-medium",
        train_file="wiki.train.tokens",
        validation_file="wiki.test.tokens",
        per_device_train_batch_size=4,
        per_device_eval_batch_size=4,
        gradient_accumulation_steps=8,
        block_size=1024,
        weight_decay=0.01,
        logging_steps=100,
        num_train_epochs=5.0,
        overwrite_output_dir=True,
    )
    notes = capsys.readouterr().err.splitlines()
    told = {"ort_trainer", "model_type", "do_eval", "do_train"}
    assert len(notes) == len(told) + 1
    for name in told:
        assert any(f"note: --{name} changes nothing: " in note for note in notes)
    assert any("--config_name means --model_name_or_path gpt2-medium" in note for note in notes)


def test_every_switch_that_people_bring_has_one_meaning() -> None:
    for name in BROUGHT.split():
        meanings = [name in FIELDS, name in RENAMED, name in SWITCHES, name == "config_name"]
        assert sum(meanings) == 1, name
    assert set(RENAMED.values()) <= set(FIELDS)
    assert not set(SWITCHES) & (set(FIELDS) | set(RENAMED))


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_changes_nothing_is_told_in_one_line(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flag = SWITCHES[name].flag
    for words in ([f"--{name}"], [f"--{name.replace('_', '-')}"]) if flag else (
        [f"--{name}", "x"], [f"--{name}=x"]
    ):  # fmt: skip
        assert parse([*words, "--seed", "3"], "finetune", FinetuneConfig) == FinetuneConfig(seed=3)
        [note] = capsys.readouterr().err.splitlines()
        assert note.startswith("onward finetune: note: --") and "changes nothing: " in note
        assert name in note.replace("-", "_")


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_change_the_run_is_refused_in_one_line(
    name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["finetune", f"--{name}", *([] if SWITCHES[name].flag else ["7"])]) == 2
    printed = capsys.readouterr()
    [line] = printed.err.splitlines()
    assert line.startswith(f"onward finetune: error: --{name} is not supported: ")
    assert line.endswith(f"; fix: {SWITCHES[name].fix}") and printed.out == ""
    assert list(tmp_path.iterdir()) == []
    granted = ["false", "False"] if SWITCHES[name].flag else SWITCHES[name].asks_nothing
    for value in granted:
        assert parse([f"--{name}={value}"], "finetune", FinetuneConfig) == FinetuneConfig()
        assert capsys.readouterr().err.count("changes nothing") == 1


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("do_train", "onward verify"),
        ("ort_trainer", "torch"),
        ("should_continue", "--overwrite_output_dir"),
    ],
)
def test_what_cannot_be_left_out_is_refused_when_it_is_switched_off(
    name: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["finetune", f"--{name}", "false"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"--{name} false: " in line and fix in line


def test_a_configuration_alone_is_a_preset_or_refused(capsys: pytest.CaptureFixture[str]) -> None:
    found = parse(["--config_name", "gpt2-small"], "finetune", FinetuneConfig)
    assert found == FinetuneConfig(model_name_or_path="gpt2-small")
    same = ["--config_name", "folder", "--model", "folder"]
    assert parse(same, "finetune", FinetuneConfig) == FinetuneConfig(model_name_or_path="folder")
    capsys.readouterr()
    for words in (["--config_name", "folder"], ["--config_name", "folder", "--model", "other"],
                  ["--config_name", "gpt2-small", "--model", "gpt2-tiny"]):  # fmt: skip
        assert main(["finetune", *words]) == 2
        [line] = capsys.readouterr().err.splitlines()
        assert "in --config_name; fix: " in line


def test_a_renamed_switch_is_the_same_option_twice(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--per_gpu_train_batch_size", "2", "--per_device_train_batch_size", "4"]
    assert main(["finetune", *words]) == 2
    assert "option --per_device_train_batch_size twice" in capsys.readouterr().err
