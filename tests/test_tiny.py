"""Whether an installation works: `make test-tiny`, or `python -m pytest tests/test_tiny.py`.

One tiny transformer goes through each door of the library, beside eager PyTorch: the native kernels
are loaded and used, a Trainer's steps leave PyTorch's weights, an accelerated model has PyTorch's
gradients, and an exported file computes the model's outputs in onnx's own evaluator. It needs torch
and onnx alone, no network and no GPU. Where one of these fails, `onward doctor` says what is
installed; where they pass and your model fails, the installation is not why.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from onnx.reference import ReferenceEvaluator
from torch import nn
from torch.nn import functional as F

import onward
from onward.environment import environment
from onward.kernels.native import library

B, T, D, V = 3, 7, 16, 11  # batch, tokens, width, vocabulary
Batch = tuple[torch.Tensor, torch.Tensor]


class Tiny(nn.Module):
    """One block of a transformer, i64[B,T] -> f32[B,T,V]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, D)
        self.norm = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D, bias=False)
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.head = nn.Linear(D, V)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)  # f32[B,T,D]
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 2, D // 2)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # f32[B,2,T,D/2]
        x = x + y.transpose(1, 2).flatten(2)
        return self.head(x + self.down(F.gelu(self.up(x))))


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.fixture(scope="module")
def batch() -> Batch:
    torch.manual_seed(0)
    return torch.randint(0, V, (B, T)), torch.randint(0, V, (B, T))


@pytest.fixture(scope="module")
def trainer() -> onward.Trainer:
    """One capture serves the tests of a Trainer."""
    torch.manual_seed(0)
    model = Tiny()
    return onward.Trainer(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_of)


def test_native_kernels_are_loaded() -> None:
    if environment().native == "0" or not library.built():
        pytest.skip(f"native kernels are {library.about()}: all works, and most of it slower")
    assert library.library() is not None, library.about()


def test_a_trainer_leaves_pytorchs_weights(trainer: onward.Trainer, batch: Batch) -> None:
    ids, labels = batch
    eager = copy.deepcopy(trainer.model)
    theirs = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    for _ in range(3):
        want = loss_of(eager(ids), labels)
        theirs.zero_grad()
        want.backward()
        theirs.step()
        loss = trainer.train_step(ids, labels).loss
        torch.testing.assert_close(loss, want.detach(), rtol=1e-5, atol=1e-6)
    for (name, ours), p in zip(trainer.model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(ours, p, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    used = {launch.kernel.name.partition(".")[0] for launch in trainer.plan.launches}
    assert "native" in used or library.library() is None


def test_an_accelerated_model_has_pytorchs_gradients(batch: Batch) -> None:
    ids, labels = batch
    model = Tiny()
    eager = copy.deepcopy(model)
    onward.accelerate(model, strict=True)  # a call that has no graph raises
    losses = [loss_of(each(ids), labels) for each in (model, eager)]
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    for loss in losses:
        loss.backward()
    for (name, ours), p in zip(model.named_parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(
            ours.grad, p.grad, rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_an_exported_file_computes_the_models_outputs(
    trainer: onward.Trainer, batch: Batch, tmp_path: Path
) -> None:
    ids, labels = batch
    trainer.train_step(ids, labels)
    evaluator = ReferenceEvaluator(str(trainer.export_onnx(tmp_path / "tiny.onnx")))
    few = ids[:2, :5]  # sizes are symbolic
    [logits] = evaluator.run(None, {str(evaluator.input_names[0]): few.numpy()})
    want = trainer.model(few).detach()
    torch.testing.assert_close(torch.from_numpy(logits), want, rtol=1e-4, atol=1e-5)
