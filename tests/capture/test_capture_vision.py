"""Tiny models of images and sound from Transformers: loss and gradients are eager PyTorch's, and
one capture serves every batch size."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import transformers as hf
from tiny_families import assert_same
from torch import nn

CLASSES = 2  # as a configuration has where it is not told
VIT = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "image_size": 32, "patch_size": 8, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
SWIN = {
    "embed_dim": 8, "depths": [2], "num_heads": [2], "window_size": 4, "image_size": 16,
    "patch_size": 2, "hidden_dropout_prob": 0.0, "drop_path_rate": 0.0,
}  # fmt: skip
WAV2VEC2 = {
    "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64,
    "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "hidden_dropout": 0.0,
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "classifier_proj_size": 8,
    "num_conv_pos_embedding_groups": 2, "attention_dropout": 0.0, "feat_proj_dropout": 0.0,
    "layerdrop": 0.0, "final_dropout": 0.0, "activation_dropout": 0.0, "apply_spec_augment": False,
}  # fmt: skip
MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...], int]] = {  # sizes; convolutions left
    "ViT": (
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**VIT)),
        (3, 32, 32), 0,
    ),
    "Swin": (
        lambda: hf.SwinForImageClassification(hf.SwinConfig(**SWIN)),
        (3, 16, 16), 0,
    ),
    "ConvNext": (
        lambda: hf.ConvNextForImageClassification(
            hf.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
        ),
        (3, 16, 16), 3,
    ),
    "Wav2Vec2": (
        lambda: hf.Wav2Vec2ForSequenceClassification(
            hf.Wav2Vec2Config(**WAV2VEC2)
        ),
        (400,), 3,
    ),
}  # fmt: skip


class Loss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(x, labels=labels).loss


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients(name: str) -> None:
    make, sizes, convolutions = MODELS[name]
    torch.manual_seed(0)
    model = tiny.ready(Loss(make()))
    batches = [
        {"x": torch.randn(n, *sizes), "labels": torch.randint(0, CLASSES, (n,))}
        for n in (2, 3, 3, 4)
    ]
    made = tiny.compiled(model, batches[0])
    graph = made.differentiated(tiny.trained(made))
    wanted = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
    assert_same([tiny.plain(tiny.execute(made, graph, x, wanted)) for x in batches], model, batches)
    assert sum(node.op_type == "Conv" for node in made.forward) == convolutions
