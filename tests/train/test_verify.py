"""Verification tells right from wrong, and names the stage and the node where they part."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from tiny import batch, bert, gpt2, mlp
from torch import nn

import onward
from onward import OnwardError, TrainerOptions
from onward.differentiate.rule_table import RULES
from onward.kernels import KERNELS, host
from onward.rewrite import FORWARD, STEP
from onward.train.verify import ComparedTensor, allowed_difference

pytestmark = pytest.mark.usefixtures("captures_kept")

MAKERS = {"gpt2": gpt2, "bert": bert}


FORMS = ("dropout off", "rows that are read")


def sabotage(monkeypatch: pytest.MonkeyPatch, op_type: str, factor: float) -> None:
    """The rule's first gradient comes out too large."""
    plain = RULES[op_type]

    def wrong(b: Any, dys: Any, ys: Any, xs: Any, attrs: Any) -> Any:
        first, *rest = plain(b, dys, ys, xs, attrs)
        return [b.Mul(first, factor), *rest]

    monkeypatch.setitem(RULES, op_type, wrong)


def test_good_model_is_ok_and_nothing_changes() -> None:
    model, data = gpt2(), batch(padding="right")
    trainer = onward.Trainer(model, onward.optim.AdamW())
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    rng = torch.get_rng_state()
    report = trainer.verify(data, bisect=True)
    assert report.ok, str(report)
    assert str(report).startswith(f"ok: {len(report.rows)} tensors compared")
    assert any("no stage differs" in note for note in report.notes)
    assert "DIFFERS" not in str(report)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), rng)
    assert model.training
    assert trainer.updates == 0


def test_evaluation_mode_is_put_back() -> None:
    model = gpt2().eval()
    trainer = onward.Trainer(model, onward.optim.AdamW())
    assert trainer.verify(batch()).ok
    assert not any(m.training for m in model.modules())


@pytest.mark.sample(12)
@pytest.mark.parametrize("op_type", ["BiasActivation", "LayerNormalization", "FlashAttention"])
@pytest.mark.parametrize("kind", MAKERS)
def test_wrong_gradient_rule_is_found(
    kind: str, op_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch, op_type, 1.001)
    trainer = onward.Trainer(MAKERS[kind](), onward.optim.AdamW())
    report = trainer.verify(batch(), bisect=True)
    assert not report.ok
    assert str(report).startswith("FAILED")
    assert "DIFFERS grad." in str(report)
    bad = [r for r in report.rows if not r.ok]
    # a wrong graph is wrong on every engine: eager PyTorch alone tells
    assert {r.engine for r in bad} == {f"eager PyTorch ({form})" for form in FORMS}
    assert "loss" not in {r.name for r in bad}
    [note] = [n for n in report.notes if n.startswith("bisect:")]
    assert "differs from eager PyTorch after pass 'differentiate'" in note
    assert "the graph itself computes something other" in note


def test_wrong_kernel_is_found_and_the_node_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime runs the same graph: where the executor departs, there is the kernel."""
    plain = next(k for k in KERNELS["BiasActivationGrad"] if k.where(host()) is None)

    def wrong(use: Any) -> Any:
        launch = plain.bind(use)

        def run() -> None:
            launch()
            use.y.mul_(1.01)

        return run

    monkeypatch.setitem(KERNELS, "BiasActivationGrad", (replace(plain, bind=wrong),))
    trainer = onward.Trainer(gpt2(), onward.optim.AdamW())
    report = trainer.verify(batch(), bisect=True)
    bad = {r.engine for r in report.rows if not r.ok}
    eager = {f"eager PyTorch ({form})" for form in FORMS}
    assert bad == {*eager, "stock onnxruntime (dropout on)"}
    [note] = [n for n in report.notes if n.startswith("bisect:")]
    assert "first node: " in note
    assert "BiasActivationGrad" in note
    assert "transformer.h.1.mlp" in note, "the backward meets the last layer first"


def test_option_raises_before_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    sabotage(monkeypatch, "Tanh", 1.01)
    model = mlp()
    kept = [p.detach().clone() for p in model.parameters()]
    trainer = onward.Trainer(
        model, onward.optim.AdamW(), loss_fn=nn.functional.cross_entropy,
        options=TrainerOptions(verify=True),
    )  # fmt: skip
    x, y = torch.randn(6, 8), torch.arange(6) % 5
    with pytest.raises(OnwardError, match=r"DIFFERS grad\.inner\.weight"):
        trainer.train_step(x, y)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), kept, strict=True))
    monkeypatch.undo()
    assert trainer.train_step(x, y).updated
    assert not torch.equal(model.inner.weight, kept[0])


class Busy(nn.Module):
    """Shared and tied modules, a buffer, dropout within attention, draws, an input written over."""

    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.mix = nn.Linear(8, 8)
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.ones(8))

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.mix(torch.tanh(self.mix(self.embed(ids) + self.offset)))
        x = x + self.attend(x, x, x, need_weights=False)[0]
        x = x * (x.float() * x.float()).mean(-1, keepdim=True).to(torch.float32).rsqrt()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_everything_is_put_back(around: Any) -> None:
    torch.manual_seed(0)
    model = Busy()
    model.embed.weight.grad = torch.ones_like(model.embed.weight)
    held = [*model.parameters(), *model.buffers()]
    before = [(t.detach().clone(), t._version, t.requires_grad) for t in held]
    flags = [m.training for m in model.modules()]
    trainer = onward.Trainer(model, onward.optim.AdamW())
    draws = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index]
    with around():
        ids = torch.randint(0, 7, (3, 5), generator=torch.Generator().manual_seed(2))
        given = ids.clone()
        report = trainer.verify(ids=ids, labels=ids)
        assert torch.is_grad_enabled() is (around is torch.enable_grad)
    assert report.ok, str(report)
    assert torch.equal(ids, given)
    for tensor, (value, version, asks) in zip(held, before, strict=True):
        assert torch.equal(tensor, value) and tensor._version == version
        assert tensor.requires_grad == asks
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(model.embed.weight.grad, torch.ones_like(model.embed.weight))
    assert all(p.grad is None for p in model.parameters() if p is not model.embed.weight)
    assert torch.equal(torch.get_rng_state(), draws[0])
    assert random.getstate() == draws[1] and np.random.get_state()[1].tolist() == draws[2]  # type: ignore[index]


def test_a_loss_with_class_weights_is_doubled_with_the_model() -> None:
    trainer = onward.Trainer(
        mlp(), onward.optim.AdamW(), loss_fn=nn.CrossEntropyLoss(weight=torch.rand(5) + 0.5)
    )
    assert trainer.verify(torch.randn(6, 8), torch.arange(6) % 5).ok


def test_law_in_numbers() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)  # norm 5
    eager = (exact + torch.tensor([0.0, 0.5])).float()
    assert allowed_difference(eager, exact) == pytest.approx(1.0 + 5e-7)
    assert allowed_difference(exact.float(), exact) == pytest.approx(5e-7)
    assert ComparedTensor("e", "n", 1.0, 1.0).ok
    assert not ComparedTensor("e", "n", 1.1, 1.0).ok
    assert not ComparedTensor("e", "n", float("nan"), 1.0).ok


def test_missing_gradient_is_not_ok(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule that returns nothing leaves parameters without a gradient that eager has."""
    monkeypatch.setitem(RULES, "Tanh", lambda b, dys, ys, xs, attrs: [None])
    model = mlp()
    trainer = onward.Trainer(model, onward.optim.AdamW(), loss_fn=nn.functional.cross_entropy)
    report = trainer.verify(torch.randn(6, 8), torch.arange(6) % 5)
    bad = {r.name for r in report.rows if not r.ok}
    assert {"grad.inner.weight", "grad.inner.bias"} <= bad


# ---- dumps


def test_dump_writes_every_stage_as_text_and_valid_onnx(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dump"
    monkeypatch.setenv("ONWARD_DUMP", str(folder))
    monkeypatch.setenv("ONWARD_CHECK", "1")
    trainer = onward.Trainer(
        gpt2(layers=1), onward.optim.AdamW(), options=TrainerOptions(max_grad_norm=1.0)
    )
    trainer.train_step(batch(padding="right"))
    stems = sorted(p.stem for p in folder.glob("*.onnx"))
    stages = [
        "capture", *(f"forward-{p.name}" for p in FORWARD), "pack-row_demand", "rows-specialize",
        "rows-plan", "differentiate", "updates", *(f"step-{p.name}" for p in STEP), "specialize",
    ]  # fmt: skip
    stages = [f"{i:02d}-{stage}" for i, stage in enumerate(stages)]
    assert stems == [stage for stage in stages if not stage.endswith("plan")]
    for stem in stems:
        model = onnx.load(str(folder / f"{stem}.onnx"))
        onnx.checker.check_model(model, full_check=True)
        found = {o.name for o in model.graph.output}
        assert "loss" in found or (stem.endswith("rows-specialize") and found == {"R0", "R1"})
        text = (folder / f"{stem}.txt").read_text()
        assert text.startswith("graph ")
        assert "%batch.input_ids: i64[B,T] batch" in text
    _, plan = sorted(folder.glob("*-plan.txt"))
    assert plan.read_text() == f"{trainer.plan}\n"


def test_environment_switches_passes_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_DISABLE", "common_subexpression_elimination,noop")
    trainer = onward.Trainer(gpt2(layers=1), onward.optim.AdamW())
    trainer.train_step(batch())
    run = {p["name"] for p in trainer.report()["passes"]}
    assert run == {p.name for p in (*FORWARD, *STEP)} - {
        "common_subexpression_elimination",
        "noop",
    } | {"row_demand"}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_between_recurrent_layers_is_off_in_eager_too(kind: Any) -> None:
    """Otherwise the bound of a comparison is as wide as the dropout's own noise."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.layers = kind(6, 8, num_layers=2, dropout=0.5, batch_first=True)
            self.out = nn.Linear(8, 6)

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": (self.out(self.layers(x)[0]) - x).pow(2).mean()}

    model = Recurrent()
    found = onward.Trainer(model, torch.optim.SGD(model.parameters(), 0.1)).verify(
        x=torch.randn(3, 5, 6)
    )
    assert found.ok
    assert all(row.difference < 1e-6 for row in found.rows), str(found)
