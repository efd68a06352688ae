"""`onward finetune` from text to folder, with the torch engine; Onward's where it is there."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import math
import time
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file

from onward.cli import main
from onward.recipes.describe import describe
from onward.recipes.engines import EagerTrainer
from onward.recipes.loop import Job, evaluate, train, update_batches
from onward.recipes.optimizers import optimizer_of
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.progress import Progress, peak_rss_mib, reset_peak_rss, rss_mib
from onward.recipes.samples import Samples

SMALL = [
    *("--vocab_size", "320", "--block_size", "32", "--max_steps", "6", "--logging_steps", "4"),
    *("--per_device_train_batch_size", "4", "--dropout", "0", "--max_eval_samples", "5"),
]


def run(output: Path, *options: str, engine: str = "torch") -> int:
    return main(["finetune", "--engine", engine, "--output_dir", str(output), *options])


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def test_writes_a_folder_that_transformers_loads(
    tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "out"
    assert run(output, "--train-file", str(text_file), *SMALL) == 0
    printed = capsys.readouterr()
    assert "perplexity" in printed.out and "unigram model" in printed.out
    assert "torch: step 4/6  loss" in printed.err and "ETA" in printed.err
    assert {path.name for path in output.iterdir()} >= {
        "run_config.json",
        "metrics.jsonl",
        "eval_results.json",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert not list(tmp_path.glob(".*"))

    record = read(output / "run_config.json")
    assert record["options"]["train_file"] == str(text_file)
    assert record["options"]["learning_rate"] == 1e-3
    assert record["texts"][0]["sha256"] == hashlib.sha256(text_file.read_bytes()).hexdigest()
    assert record["versions"]["torch"] and record["command"][:2] == ["onward", "finetune"]
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [4, 6]

    # The saved model gives the perplexity that was reported.
    results = read(output / "eval_results.json")
    run_ = describe(FinetuneConfig(**{**record["options"], "output_dir": None}))
    model = AutoModelForCausalLM.from_pretrained(output).eval()
    assert model.config.use_cache
    rows = torch.from_numpy(run_.job.eval.blocks).long()
    assert len(rows) == 5 == results["eval_samples"]
    with torch.no_grad():
        loss = float(model(input_ids=rows, labels=rows).loss)
    assert loss == pytest.approx(results["eval_loss"], rel=1e-5)
    assert results["perplexity"] == pytest.approx(math.exp(results["eval_loss"]))
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer.decode(tokenizer("def f(x):\n")["input_ids"]) == "def f(x):\n"


def test_learns_a_folder_model_further_and_below_unigram(
    tmp_path: Path, text_file: Path, model_folder: Path
) -> None:
    options = ["--model", str(model_folder), "--train_file", str(text_file)]
    options += ["--eval-file", str(text_file), "--block-size", "32", "--learning_rate", "3e-3"]
    assert run(tmp_path / "out", *options, "--max_steps", "150", "--dropout", "0") == 0
    results = read(tmp_path / "out" / "eval_results.json")
    record = read(tmp_path / "out" / "run_config.json")
    assert results["perplexity"] < 0.8 * record["baseline"]["value"]


def test_same_seed_gives_the_same_losses_and_another_seed_others(
    tmp_path: Path, text_file: Path
) -> None:
    losses = []
    for number, seed in enumerate(("1", "1", "2")):
        output = tmp_path / str(number)
        options = [*SMALL, "--seed", seed, "--dropout", "0.2"]
        del options[options.index("0") - 1 : options.index("0") + 1]
        assert run(output, "--train_file", str(text_file), *options) == 0
        losses.append(read(output / "eval_results.json")["eval_loss"])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_learns_as_autocast_does_and_saves_fp32(
    precision: str, text_file: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    losses = []
    for engine in ("onward", "torch"):
        output = tmp_path / engine
        options = ["--train_file", str(text_file), *SMALL, f"--{precision}", "--export_dtype"]
        options.append("float16")
        assert run(output, *options, engine=engine) == 0
        losses.append(read(output / "eval_results.json")["eval_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=2e-3)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "onward")
    assert all(p.dtype == torch.float32 for p in model.parameters())
    stored = onnx.load(str(tmp_path / "onward" / "model.onnx")).graph.initializer
    [table] = [i for i in stored if i.name == "transformer.wte.weight"]
    assert table.data_type == onnx.TensorProto.FLOAT16


def test_where_moments_lie_and_in_what(text_file: Path, tmp_path: Path) -> None:
    """In files they are the same numbers; in codes of 8 bits a learning rate brings others."""
    losses: dict[str, float] = {}
    moments = {"as ever": [], "files": ["--offload_optimizer", "disk", "--offload_dir"]}
    moments["files"].append(str(tmp_path))
    moments["codes"] = ["--optimizer_state", "8bit"]
    for name, words in moments.items():
        output = tmp_path / name
        options = ["--train_file", str(text_file), *SMALL, *words]
        assert run(output, *options, engine="onward") == 0
        losses[name] = read(output / "eval_results.json")["eval_loss"]
    assert losses["files"] == losses["as ever"] != losses["codes"]
    assert losses["codes"] == pytest.approx(losses["as ever"], rel=1e-2)


def test_accumulation_equals_the_larger_batch(text_file: Path, tmp_path: Path) -> None:
    base = FinetuneConfig(
        train_file=str(text_file), vocab_size=300, block_size=16, max_steps=4, dropout=0.0
    )
    results = []
    for batch, accumulate in ((8, 1), (2, 4)):
        config = dataclasses.replace(
            base, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulate
        )
        results.append(train(describe(config).job, "torch", tmp_path, save_model=False))
    assert results[0].start_weights_sha256 == results[1].start_weights_sha256
    np.testing.assert_allclose(results[0].step_losses, results[1].step_losses, rtol=1e-5)
    assert results[0].eval_loss == pytest.approx(results[1].eval_loss, rel=1e-5)


def test_dry_run_writes_nothing(
    tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    options = [*SMALL, "--num_train_epochs", "2", "--dry-run"]
    del options[options.index("--max_steps") : options.index("--max_steps") + 2]
    assert run(output, "--train_file", str(text_file), *options) == 0
    out = capsys.readouterr().out
    blocks_of_train = int(out.split(" blocks of 32")[0].split()[-1])
    assert f"{2 * (blocks_of_train // 4)} updates of 1 x 4 x 32 tokens" in out
    assert list(tmp_path.iterdir()) == [text_file.parent]


def test_default_output_folder_has_the_time_in_its_name(
    tmp_path: Path, text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["finetune", "--engine=torch", f"--train_file={text_file}", *SMALL]) == 0
    (output,) = (tmp_path / "runs").iterdir()
    assert output.name.startswith("finetune-2") and (output / "model.safetensors").exists()


def test_vectors_have_no_decay_and_tied_weights_come_once(text_file: Path) -> None:
    from onward.recipes.start_model import build_model

    config = FinetuneConfig(train_file=str(text_file), vocab_size=300, weight_decay=0.3)
    job = describe(config).job
    model = build_model(job.config, job.model_config)
    decayed, spared = optimizer_of(model, job.config).param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.3, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    assert all(names[id(p)].endswith("bias") or ".ln_" in names[id(p)] for p in spared["params"])
    assert len(decayed["params"]) + len(spared["params"]) == len(names)
    assert sum(p.numel() for p in model.parameters()) == describe(config).parameters


SHARED = ["adamw_torch", "sgd", "adagrad", "rmsprop", "adafactor"]  # names, by transformers


@pytest.mark.parametrize("name", SHARED)
def test_a_name_of_transformers_is_its_optimizer(name: str, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    given: dict[str, Any] = {
        "optim": name, "learning_rate": 3e-3, "adam_beta1": 0.8, "adam_beta2": 0.95,
        "adam_epsilon": 1e-7, "weight_decay": 0.2,
    }  # fmt: skip
    arguments = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **given)
    kind, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
    model: Any = torch.nn.Linear(3, 2)
    found = optimizer_of(model, FinetuneConfig(**given))
    assert type(found) is kind
    (theirs,) = kind(model.parameters(), **settings).param_groups
    for group, decay in zip(found.param_groups, (0.2, 0.0), strict=True):
        assert group["weight_decay"] == decay
        for key in theirs.keys() - {"params", "weight_decay"}:
            assert group[key] == theirs[key], key


def test_adafactor_is_of_one_process() -> None:
    model: Any = torch.nn.Linear(3, 2)
    config = FinetuneConfig(optim="adafactor", mesh="dp_replicate=2")
    with pytest.raises(InputError, match=r"adafactor makes its own step.*in --optim; fix: "):
        optimizer_of(model, config)


def test_adafactor_steps_by_the_learning_rate(text_file: Path, tmp_path: Path) -> None:
    """torch's rule scales a step by the weights, of which a vector of zeros is hardly moved."""
    config = FinetuneConfig(
        train_file=str(text_file), vocab_size=300, block_size=16, max_steps=3, optim="adafactor",
        per_device_train_batch_size=4, dropout=0.0, learning_rate=0.01,
        lr_scheduler_type="constant", max_eval_samples=4,
        config_overrides="n_layer=1,n_embd=32,n_head=2",
    )  # fmt: skip
    job = describe(config).job
    found = {name: train(job, name, tmp_path / name) for name in ("onward", "torch")}
    np.testing.assert_allclose(found["onward"].step_losses, found["torch"].step_losses, rtol=1e-4)
    biases = [
        load_file(tmp_path / name / "model.safetensors")["transformer.h.0.mlp.c_fc.bias"]
        for name in found
    ]
    assert biases[0].square().mean().sqrt() > 0.01, "the first of three steps has this size"
    torch.testing.assert_close(biases[0], biases[1], rtol=1e-2, atol=1e-4)


def test_dropout_reaches_every_place(model_folder: Path, text_file: Path) -> None:
    config = FinetuneConfig(
        model_name_or_path=str(model_folder), train_file=str(text_file), block_size=32, dropout=0.25
    )
    model_config = describe(config).job.model_config
    assert (model_config.resid_pdrop, model_config.embd_pdrop, model_config.attn_pdrop) == (
        0.25,
        0.25,
        0.25,
    )
    untouched = describe(dataclasses.replace(config, dropout=None)).job.model_config
    assert untouched.resid_pdrop == 0.1


def test_epochs_visit_every_block_once() -> None:
    numbers = np.arange(10, dtype=np.int32)[:, None]

    def first(count: int) -> list[list[int]]:
        batches = update_batches(Samples({"input_ids": numbers}), 3, seed=0)
        taken = [batch for _ in range(3) for batch in batches][:count]
        assert all(len(batch) == 3 for batch in taken)
        return [[int(row["input_ids"][0]) for row in batch] for batch in taken]

    order = first(7)
    for number, epoch in enumerate((order[:3], order[3:6])):
        found = list(chain.from_iterable(epoch))
        assert len(set(found)) == 9
        # the order that NumPy gives for (seed, epoch)
        assert found == np.random.default_rng((0, number)).permutation(10)[:9].tolist()
    assert order == first(7)


def test_evaluation_is_exact_whatever_the_batch(model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder)
    config = FinetuneConfig(learning_rate=0.0)
    trainer = EagerTrainer(model, optimizer_of(model, config), config)
    rows = np.random.default_rng(0).integers(0, 320, (7, 16)).astype(np.int32)
    samples, nothing = Samples({"input_ids": rows}), Samples({})
    found = [
        evaluate(
            trainer,
            Job(
                dataclasses.replace(config, per_device_eval_batch_size=size),
                model.config,
                nothing,
                samples,
                None,  # type: ignore[arg-type]
            ),
        )
        for size in (1, 3, 7, 16)
    ]
    losses = [loss for loss, _ in found]
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)
    assert all(scores == {"perplexity": math.exp(loss)} for loss, scores in found)


def test_a_loss_that_is_not_finite_stops_the_run(
    tmp_path: Path, text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--learning_rate", "1e30", "--max_grad_norm", "0", "--max_steps", "50"]
    base = [*SMALL]
    del base[base.index("--max_steps") : base.index("--max_steps") + 2]
    assert run(tmp_path / "out", "--train_file", str(text_file), *base, *options) == 2
    assert "the loss is nan, at update" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [text_file.parent]


def test_bar_on_a_terminal_shows_every_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with Progress("torch", tmp_path / "metrics.jsonl", 3, 10, 2) as progress:
        for step, loss in enumerate((4.0, 2.0, 5.0), 1):
            progress.update(step, loss, None, 1e-3, 64)
    shown = terminal.getvalue()
    assert "torch: 100%" in shown and "loss 5.0000  lr 1.00e-03" in shown
    assert all(unit in shown for unit in ("tokens/s", "ms/step", "MiB", "3/3"))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"], line["epoch"]) for line in lines] == [
        (2, 3.0, 0.2),
        (3, 5.0, 0.3),
    ]


def test_waiting_for_data_is_told_from_a_twentieth_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("torch", tmp_path / "metrics.jsonl", 4, 10, 2) as progress:
        for step in range(1, 5):
            time.sleep(0.05)
            progress.update(step, 1.0, None, 1e-3, 64, 0.04 if step > 2 else 0.0)
    first, second = capsys.readouterr().err.splitlines()
    assert "waits for data" not in first and "waits for data" in second
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["data_share"] == 0.0 and 0.1 < lines[1]["data_share"] <= 0.8


def test_peak_memory_starts_anew() -> None:
    before = rss_mib()
    block = np.ones(25 * 2**20 // 8 * 8)  # 200 MiB
    assert peak_rss_mib() >= before + 190
    del block
    reset_peak_rss()
    assert peak_rss_mib() < before + 100


@pytest.mark.parametrize("ok", [True, False])
def test_verify_gives_the_report_and_its_status(
    ok: bool,
    tmp_path: Path,
    text_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Report:
        def __init__(self, ok: bool) -> None:
            self.ok = ok

        def __str__(self) -> str:
            return "the report"

    class Verifying:
        def __init__(self, *_: object) -> None: ...

        def verify(self, batch: dict[str, torch.Tensor], bisect: bool) -> Report:
            assert bisect and batch["input_ids"].shape == (8, 32)
            assert batch["input_ids"].dtype == batch["labels"].dtype == torch.int64
            return Report(ok)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("onward.recipes.job_start.onward_trainer", Verifying)
    options = ["--train_file", str(text_file), "--vocab_size", "300", "--block_size", "32"]
    assert main(["verify", *options, "--bisect"]) == (0 if ok else 1)
    assert capsys.readouterr().out == "the report\n"
    assert list(tmp_path.iterdir()) == [text_file.parent]
