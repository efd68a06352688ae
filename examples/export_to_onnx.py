"""Trains a classifier, writes its forward as ONNX, and runs the file with stock onnxruntime.

python export_to_onnx.py [model.onnx]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn

import onward


def main(path: str | None = None) -> float:
    """The largest difference between the file's logits and the model's."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 3))
    trainer = onward.Trainer(
        model, onward.optim.AdamW(lr=1e-2), loss_fn=nn.functional.cross_entropy
    )
    x = torch.randn(512, 16)  # f32[B,D]
    labels = x[:, :3].argmax(1)  # i64[B]
    for _ in range(60):
        loss = trainer.train_step(x, labels).loss
    print(f"loss {float(loss):.3f}")

    with tempfile.TemporaryDirectory() as folder:
        file = trainer.export_onnx(Path(path) if path else Path(folder) / "model.onnx")
        session = onnxruntime.InferenceSession(str(file))
        (wanted,) = session.get_inputs()
        print(f"{file.name}: {wanted.name} {wanted.shape} -> {session.get_outputs()[0].name}")
        few = x[:5].numpy()  # sizes are symbolic: any batch will do
        (logits,) = session.run(None, {wanted.name: few})

    difference = float(np.abs(logits - model.eval()(x[:5]).detach().numpy()).max())
    print(f"largest difference to PyTorch: {difference:.1e}")
    return difference


if __name__ == "__main__":
    main(*sys.argv[1:2])
