"""ONNX models that torch's TorchScript exporter writes, and the modules that they came from."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from tiny import VOCABULARY, bert, gpt2
from torch import nn


class Words(nn.Module):
    """An embedding, two layers with a norm between them, and logits."""

    def __init__(self, activation: str = "gelu") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.up = nn.Embedding(50, 16), nn.Linear(16, 32)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 50)
        self.activation = getattr(nn.functional, activation)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.activation(self.up(self.table(ids)))))


class Pooled(nn.Module):
    """Two towers over shared words, a vector for each side."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 16)
        self.left, self.right = nn.Linear(16, 8), nn.Linear(16, 8)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(self.table(a).mean(1)), self.right(self.table(b).mean(1))


class Logits(nn.Module):
    """A model of transformers by position, its logits alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, attention_mask=mask).logits


def exported(
    model: nn.Module,
    inputs: dict[str, torch.Tensor],
    outputs: list[str],
    sizes: str = "BT",
    opset: int = 17,
) -> onnx.ModelProto:
    """The model by torch's TorchScript exporter, with open sizes of the inputs' first dims."""
    file: Any = io.BytesIO()  # which torch's types of the function leave out
    axes = {name: dict(enumerate(sizes[: x.dim()])) for name, x in inputs.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated, and in use
        torch.onnx.export(  # noqa: TID251 - a file that another tool wrote is what is wanted
            model.eval(), tuple(inputs.values()), file, input_names=list(inputs),
            output_names=outputs, dynamic_axes=axes, dynamo=False, opset_version=opset,
        )  # fmt: skip
    return onnx.load_from_string(file.getvalue())


def words_file() -> onnx.ModelProto:
    """A `Words` whose output is named `logits`."""
    return exported(Words(), {"ids": torch.zeros(2, 5, dtype=torch.int64)}, ["logits"])


def words_batches(steps: int, rows: int = 4) -> list[dict[str, np.ndarray]]:
    """Batches for `words_file`, of several lengths, ids i64[B,T] and labels i64[B,T], some of which
    are -100."""
    found: list[dict[str, np.ndarray]] = []
    for i in range(steps):
        ids = np.random.default_rng(i).integers(0, 50, (rows, 5 + i % 3))
        found.append({"ids": ids, "labels": np.where(ids % 5 == 0, -100, (ids + 1) % 50)})
    return found


def padded_tokens(rows: int = 3, length: int = 8) -> dict[str, torch.Tensor]:
    """Token ids i64[B,T] and a mask whose rows end at several places."""
    ids = torch.randint(0, VOCABULARY, (rows, length))
    mask = torch.ones_like(ids)
    for i in range(rows):
        mask[i, length - i :] = 0
    return {"ids": ids, "mask": mask}


TRANSFORMERS: dict[str, Callable[..., nn.Module]] = {"gpt2": gpt2, "bert": bert}
