"""Verification in mixed precision finds what is wrong in the step with its casts alone.

Each fault leaves the fp32 step as it is, so that only the comparison with autocast can tell.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import batch, gpt2

import onward
from onward import OnwardError
from onward.graph.build import Builder
from onward.graph.graph import Graph, type_of
from onward.graph.types import DType
from onward.rewrite import Pass, lists
from onward.train.verify import Verification
from onward.train.verify.law import mixed

sys.path.insert(0, str(Path(__file__).resolve().parent))

from test_planted_faults import Patch, attribute, bypass, gradient, kernel, scaled

pytestmark = pytest.mark.usefixtures("captures_kept")
AUTOCAST = "eager PyTorch under autocast bf16 ("


def verified(bisect: bool = False, **options: Any) -> Verification:
    options = {"mixed_precision": "bf16", "disable": "row_demand", **options}
    trainer = onward.Trainer(gpt2(layers=1), onward.optim.AdamW(), options=options)
    return trainer.verify(batch(), bisect=bisect)


def low_kernel(op_type: str) -> Callable[[Patch], None]:
    """The kernel's results come out too large where it reads bf16."""

    def change(use: Any) -> None:
        if any(t is not None and t.dtype == torch.bfloat16 for t in use.inputs):
            for y in use.outputs:
                if y is not None and y.is_floating_point():
                    y.mul_(1.05)

    return kernel(op_type, change)


def after_casts(edit: Callable[[Graph], None]) -> Callable[[Patch], None]:
    """An edit as the last pass of the list that fp32 does not go through."""

    def plant(patch: Patch) -> None:
        def planted(graph: Graph) -> int:
            edit(graph)
            return 1

        patch.setattr(lists, "PRECISION", [*lists.PRECISION, Pass(planted)])

    return plant


def coarse_products(graph: Graph) -> None:
    """Operands of products are rounded to multiples of 1/64."""
    for node in list(graph):
        if node.op_type == "Gemm":
            b = Builder.at(graph, node)
            for i, x in enumerate(node.inputs[:2]):
                assert x is not None
                steps = b.cast(b.Mul(b.cast(x, DType.FLOAT), 64.0), DType.INT32)
                coarse = b.Mul(b.cast(steps, DType.FLOAT), 1 / 64)
                node.replace_input_with(i, b.cast(coarse, type_of(x).dtype))


FAULTS: dict[str, tuple[Callable[[Patch], None], str]] = {
    "a low product": (low_kernel("Gemm"), "differentiate"),
    "low attention": (low_kernel("FlashAttention"), "differentiate"),
    "the gradient of low attention": (low_kernel("FlashAttentionGrad"), "differentiate"),
    "a low activation": (low_kernel("BiasActivationGrad"), "differentiate"),
    "a cast's gradient": (gradient("Cast", scaled(0, 1.05)), "differentiate"),
    "a cast without gradient": (gradient("Cast", lambda *_: [None]), "differentiate"),
    "another activation": (
        after_casts(attribute("BiasActivation", "activation", "relu")), "differentiate"
    ),
    "attention's scale": (
        after_casts(attribute("FlashAttention", "scale", lambda x: x * 8)), "differentiate"
    ),
    "a residual left out": (after_casts(bypass("Add", 0, 3)), "precision-planted"),
    "numbers that are rounded too much": (after_casts(coarse_products), "precision-planted"),
}  # fmt: skip


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_found_by_autocast_alone(name: str, monkeypatch: Patch) -> None:
    plant, stage = FAULTS[name]
    plant(monkeypatch)
    report = verified(bisect=True)
    bad = {row.engine for row in report.rows if not row.ok}
    assert bad == {f"{AUTOCAST}dropout off)"}, str(report)
    [note] = [n for n in report.notes if n.startswith("bisect: ")]
    assert f"differs from eager PyTorch in mixed precision after pass '{stage}'" in note


def test_nothing_planted_nothing_found() -> None:
    report = verified(bisect=True)
    assert report.ok, str(report)
    assert "bisect: no stage differs from eager PyTorch" in report.notes
    compared = {row.engine for row in report.rows}
    assert f"{AUTOCAST}dropout off)" in compared
    assert len(compared) == 3
    assert "onnxruntime runs the step without casts, in fp32" in report.notes


def test_rows_that_are_read_are_compared_in_mixed_precision_too() -> None:
    data = batch(padding="right")
    model = gpt2(layers=1)
    trainer = onward.Trainer(model, onward.optim.AdamW(), options={"mixed_precision": "bf16"})
    report = trainer.verify(data)
    assert report.ok, str(report)
    assert sum(row.engine == f"{AUTOCAST}rows that are read)" for row in report.rows) == 1 + len(
        [*model.parameters()]
    )


def test_the_option_raises_before_the_first_update(monkeypatch: Patch) -> None:
    """What trains is what is verified: the precision is the option's."""
    FAULTS["a cast's gradient"][0](monkeypatch)
    model = gpt2(layers=1)
    kept = [p.detach().clone() for p in model.parameters()]
    trainer = onward.Trainer(
        model, onward.optim.AdamW(), options={"mixed_precision": "bf16", "verify": True}
    )
    with pytest.raises(OnwardError, match=r"verification failed on the first batch"):
        trainer.train_step(batch())
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), kept, strict=True))
    plain = onward.Trainer(gpt2(layers=1), onward.optim.AdamW(), verify=True)
    assert plain.train_step(batch()).updated


def test_modules_kept_in_fp32_are_nearer_than_autocast() -> None:
    report = verified(keep_in_fp32="*")
    [norm] = [
        row.difference / row.allowed
        for row in report.rows
        if row.engine.startswith(AUTOCAST) and row.name == "grad.transformer.wte.weight"
    ]
    assert report.ok
    assert norm < 1e-3


def test_what_autocast_cannot_run_is_told_in_one_line() -> None:
    class Masked(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = self.inner(x).masked_fill(x > 1, torch.finfo(torch.float32).min)
            return torch.softmax(scores, -1).square().sum()

    x, model = torch.randn(4, 8), Masked()
    options = {"mixed_precision": "bf16"}
    trainer = onward.Trainer(model, onward.optim.AdamW(), options=options)
    with pytest.raises(
        OnwardError, match=r"cannot run the model .*; fix: verify with mixed"
    ) as told:
        trainer.verify(x)
    assert "\n" not in str(told.value)
    assert trainer.train_step(x).updated


def test_the_law_in_numbers() -> None:
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)  # norm 5
    eager = exact + torch.tensor([0.0, 0.5])
    law = mixed(torch.bfloat16)
    assert law.allowed(eager, exact) == pytest.approx(1.5 + 5e-7)
    assert law.allowed(exact[0], exact[0]) == pytest.approx(3.0 * 2.0**-11)
    assert mixed(torch.float16).roundoff == 2.0**-11
