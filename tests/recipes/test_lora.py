"""`--lora_r` and `onward merge-lora`: adapters alone are trained, as by peft in eager PyTorch, and
the merged weights are a plain model with the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from onward.cli import main
from onward.recipes.describe import describe
from onward.recipes.loop import train
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.start_model import build_model

pytest.importorskip("peft")


def config(model_folder: Path, text_file: Path, **options: object) -> FinetuneConfig:
    given: dict[str, object] = {
        "model_name_or_path": str(model_folder), "train_file": str(text_file), "block_size": 32,
        "max_steps": 4, "dropout": 0.0, "max_eval_samples": 4, "learning_rate": 1e-2, "lora_r": 4,
        **options,
    }  # fmt: skip
    return FinetuneConfig(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("targets", [None, "all-linear", "c_attn,c_proj"])
def test_adapters_alone_are_trained_with_the_losses_of_eager(
    targets: str | None, model_folder: Path, text_file: Path, tmp_path: Path
) -> None:
    job = describe(config(model_folder, text_file, lora_target_modules=targets)).job
    model = build_model(job.config, job.model_config)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    losses = [
        train(job, engine, tmp_path, save_model=False).step_losses for engine in ("onward", "torch")
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][0] != losses[0][1]


def test_merged_weights_are_a_plain_model_with_the_same_loss(
    model_folder: Path, text_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run, merged = tmp_path / "run", tmp_path / "merged"
    words = ["--model", str(model_folder), "--train_file", str(text_file), "--block_size", "32"]
    words += ["--max_steps", "4", "--lora_r", "4", "--learning_rate", "1e-2", "--dropout", "0"]
    words += ["--max_eval_samples", "4", "--output_dir", str(run), "--save_steps", "2"]
    assert main(["finetune", *words]) == 0
    assert {path.name for path in run.iterdir()} >= {
        "adapter_model.safetensors", "adapter_config.json", "config.json", "model.onnx",
    }  # fmt: skip
    assert not (run / "model.safetensors").exists()
    assert not (run / "checkpoint-2" / "config.json").exists(), "its names are no plain model's"
    with safe_open(run / "adapter_model.safetensors", "pt") as held:
        assert all("lora_" in name for name in held.keys())  # noqa: SIM118

    settings = json.loads((run / "generation_config.json").read_text())
    (run / "generation_config.json").write_text(json.dumps({**settings, "forced_bos_token_id": 9}))
    assert main(["merge-lora", str(run), str(merged)]) == 0
    model = AutoModelForCausalLM.from_pretrained(merged).eval()
    assert not any("lora" in name for name, _ in model.named_parameters())
    assert model.generation_config.forced_bos_token_id == 9, "the run's, not the start's"
    results = json.loads((run / "eval_results.json").read_text())
    rows = torch.from_numpy(
        describe(config(model_folder, text_file, max_steps=4)).job.eval.blocks
    ).long()
    with torch.no_grad():
        loss = float(model(input_ids=rows, labels=rows).loss)
        before = AutoModelForCausalLM.from_pretrained(model_folder).eval()
        start = float(before(input_ids=rows, labels=rows).loss)
    assert loss == pytest.approx(results["eval_loss"], rel=1e-5)
    assert abs(loss - start) > 1e-3
    assert AutoTokenizer.from_pretrained(merged)("a b")["input_ids"]

    capsys.readouterr()
    for given, told in (
        ([str(run), str(merged)], "is there already, as OUT"),
        ([str(model_folder), str(tmp_path / "new")], "is no folder of a run, as RUN"),
        ([str(run)], "a run and a new folder are needed, after merge-lora"),
    ):
        assert main(["merge-lora", *given]) == 2
        last = capsys.readouterr().err.splitlines()[-1]
        assert told in last and "; fix: " in last
    assert main(["finetune", "--model", str(run), *words[2:-4]]) == 2
    assert "onward merge-lora" in capsys.readouterr().err


def test_a_head_is_trained_beside_adapters(text_file: Path, tmp_path: Path) -> None:
    rows = [{"text": f"def f{i}", "label": "ab"[i % 2]} for i in range(16)]
    table = tmp_path / "t.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = FinetuneConfig(
        task="text-classification", train_file=str(table), vocab_size=300, lora_r=2, max_steps=2,
        config_overrides="hidden_size=32,num_attention_heads=2,intermediate_size=48", dropout=0.0,
    )  # fmt: skip
    job = describe(given).job
    model = build_model(job.config, job.model_config)
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert any("lora_" in name for name in trained)
    assert {n for n in trained if "lora_" not in n} == {
        "classifier.modules_to_save.default.weight", "classifier.modules_to_save.default.bias",
    }  # fmt: skip
    found = [train(job, engine, tmp_path, save_model=False) for engine in ("onward", "torch")]
    assert found[0].step_losses == pytest.approx(found[1].step_losses, rel=1e-5)


@pytest.mark.parametrize(
    ("task", "preset", "targets", "heads"),
    [
        ("automatic-speech-recognition", "whisper-tiny", "q_proj,v_proj", set()),
        ("bert-pretraining", "bert-tiny", None, {"cls.seq_relationship"}),
        ("masked-lm", "bert-tiny", None, set()),
        ("causal-lm", "llama-tiny", None, set()),
        ("seq2seq-lm", "t5-tiny", None, set()),
    ],
)
def test_a_head_that_models_bring_stays_and_stays_tied(
    task: Any, preset: str, targets: str | None, heads: set[str]
) -> None:
    from onward.recipes.presets import preset_config

    given = FinetuneConfig(
        task=task, model_name_or_path=preset, lora_r=2, lora_target_modules=targets
    )
    model: Any = build_model(given, preset_config(preset, 300))
    own = {n for n, p in model.named_parameters() if p.requires_grad and "lora_" not in n}
    saved = ".modules_to_save.default"
    assert own == {f"{head}{saved}.{kind}" for head in heads for kind in ("weight", "bias")}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lora_target_modules": "nowhere"}, "peft adds no adapters to this model"),
        ({"lora_r": None, "lora_alpha": 3}, "lora_alpha without lora_r, in --lora_alpha"),
        ({"lora_r": 0}, "lora_r is 0, in --lora_r"),
    ],
)
def test_adapters_that_cannot_be_are_refused(
    options: dict[str, object], told: str, model_folder: Path, text_file: Path
) -> None:
    with pytest.raises(InputError) as caught:
        job = describe(config(model_folder, text_file, **options)).job
        build_model(job.config, job.model_config)
    assert told in str(caught.value) and "\n" not in str(caught.value)
