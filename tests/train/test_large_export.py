"""Exports with more than 2 GB of weights, which no single ONNX file can hold."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnxruntime
import pytest
import torch
from torch import nn

import onward

ROWS, WIDTH = 540_000, 1024  # 2.2 GB of f32
BEYOND = 2**31 // (4 * WIDTH)  # the first row that lies beyond 2 GiB
READ = (0, 1, ROWS // 2, BEYOND - 1, BEYOND, BEYOND + 1, ROWS - 1)


class Tall(nn.Module):
    """Token ids i64[B,T] to scores f32[B,3], by the mean of the tokens' rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        table = torch.zeros(ROWS, WIDTH)  # pages that nobody writes take no memory
        table[list(READ)] = torch.randn(len(READ), WIDTH)
        self.table = nn.Embedding(ROWS, WIDTH, _weight=table)
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(ids).mean(1))


def test_weights_beyond_2_gb_are_external_data(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if not request.config.getoption("--whole"):
        pytest.skip("writes 2.2 GB; runs with --whole")
    model = Tall()
    trainer = onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
    path = tmp_path / "model.onnx"
    trainer.export_onnx(path, {"ids": torch.tensor([[0, 1, 2], [3, 4, 5]])})
    assert {file.name for file in tmp_path.iterdir()} == {"model.onnx", "model.onnx.data"}
    assert (tmp_path / "model.onnx.data").stat().st_size > 2**31
    assert path.stat().st_size < 1 << 20
    onnx.checker.check_model(str(path))

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for ids in (torch.tensor([READ]), torch.tensor(READ).view(-1, 1)):
        [found] = session.run(None, {"ids": ids.numpy()})
        with torch.no_grad():
            want = model(ids)
        torch.testing.assert_close(torch.from_numpy(found), want)
        assert want.abs().max() > 0.01
