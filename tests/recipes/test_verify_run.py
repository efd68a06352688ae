"""`onward verify RUN` certifies a run's first step, for its page."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from onward.cli import main
from onward.recipes.describe import describe
from onward.recipes.report.tables import certificate as table
from onward.recipes.run_folder import options_of, read_record
from onward.recipes.start_model import build_model
from onward.recipes.verify import certificate
from onward.train.verify.report import ComparedTensor, Verification


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("verified") / "run"
    words = ["finetune", "--max_steps=2", "--corpus_bytes=300000", "--vocab_size=300"]
    words += [
        "--dropout=0",
        "--config_overrides=n_embd=32,n_head=2",
        "--block_size=16",
        "--save_strategy=no",
    ]
    assert main([*words, "--max_eval_samples=4", f"--output_dir={out}"]) == 0
    assert main(["verify", str(out)]) == 0
    return out


def test_distances_are_those_from_eager_in_double(folder: Path) -> None:
    """Rows of the loss and of a gradient, by PyTorch alone."""
    found = json.loads((folder / "verify.json").read_text())
    job = describe(options_of(read_record(folder))).job
    model: Any = build_model(job.config, job.model_config).eval()
    batch = job.first_batch(job.train, job.config.per_device_train_batch_size)
    values: dict[str, list[torch.Tensor]] = {}
    for made in (model, copy.deepcopy(model).double()):
        made.zero_grad()
        # the model's own loss is computed in fp32, whatever its weights are
        logits = made(input_ids=batch["input_ids"]).logits[:, :-1].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, batch["labels"][:, 1:].flatten())
        loss.backward()
        weight = made.transformer.h[1].mlp.c_fc.weight
        for name, value in (("loss", loss), ("h.1.mlp.c_fc.weight", weight.grad)):
            values.setdefault(name, []).append(value.detach().double().clone())
    assert found["ok"] and not found["mismatches"] and "torch" in found["versions"]
    rows = [row for row in found["rows"] if row["engine"].startswith("eager")]
    for name, (eager, exact) in values.items():
        [row] = [
            row for row in rows if row["name"].endswith(name) and "dropout off" in row["engine"]
        ]
        assert row["norm"] == pytest.approx(float(exact.norm()), rel=1e-9)
        assert row["eager"] == pytest.approx(float((eager - exact).norm()), rel=0.2)
        assert row["difference"] <= row["allowed"]
    others = [row for row in found["rows"] if "onnxruntime" in row["engine"]]
    assert others and all(row["eager"] is None for row in others)


def test_the_page_has_the_certificate(folder: Path) -> None:
    page = (folder / "report.html").read_text()
    assert "Numerics certificate" in page and "tensors of the first step agree" in page


def test_another_run_in_its_place_has_none(folder: Path, tmp_path: Path) -> None:
    words = ["finetune", "--max_steps=1", "--corpus_bytes=300000", "--vocab_size=300"]
    words += ["--config_overrides=n_embd=32,n_head=2", "--block_size=16", "--save_strategy=no"]
    out = tmp_path / "run"
    assert main([*words, "--max_eval_samples=4", f"--output_dir={out}"]) == 0
    (out / "verify.json").write_bytes((folder / "verify.json").read_bytes())
    again = ["--overwrite_output_dir", "--seed=1", "--max_eval_samples=4", f"--output_dir={out}"]
    assert main([*words, *again]) == 0
    assert not (out / "verify.json").exists()


def test_what_is_far_or_not_finite_is_shown_first() -> None:
    rows = [ComparedTensor("eager", f"t{n}", n * 1e-9, 1e-6, 1, 1e-8, 1.0) for n in range(20)]
    rows += [ComparedTensor("eager", "bad", math.nan, 1e-6), ComparedTensor("ort", "o", 2.0, 1.0)]
    told = json.loads(json.dumps(certificate(Verification(rows)), allow_nan=False))
    assert not told["ok"]
    found = table(told)
    assert found is not None and "20 of 22 tensors" in found.caption
    assert [row[1] for row in found.rows] == ["bad", *(f"t{n}" for n in range(19, 12, -1)), "o"]
    assert [row[-1] for row in found.rows] == ["NO", *["yes"] * 7, "NO"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "'nowhere' is no run of onward finetune"),
        (["runs/a", "--seed", "3"], "'--seed' beside a run, which has its options"),
    ],
)
def test_other_words_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", *words]) == 2
    assert said in capsys.readouterr().err
