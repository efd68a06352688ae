"""Exports in fp16 on stock onnxruntime and in bf16 on onnx's evaluator, beside torch's autocast."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from ml_dtypes import bfloat16
from onnx.reference import ReferenceEvaluator
from tiny import VOCABULARY, GatherElements, Tensors, batch, bert, gpt2, mlp
from tiny_families import CASES, rms
from torch import nn

import onward
from onward import OnwardError

pytestmark = pytest.mark.usefixtures("captures_kept")
LOW = {"float16": torch.float16, "bfloat16": torch.bfloat16}
STORED = {"float16": onnx.TensorProto.FLOAT16, "bfloat16": onnx.TensorProto.BFLOAT16}
EACH_LOW = pytest.mark.parametrize("dtype", LOW)

MODELS: dict[str, tuple[Callable[[], Any], Callable[[int, int, int], Tensors]]] = {
    "GPT-2": (gpt2, lambda size, length, seed: batch(size, length, "right", seed=seed)),
    "BERT": (bert, lambda size, length, seed: batch(size, length, "left", seed=seed)),
    "T5": (
        CASES["T5"][0],
        lambda size, length, seed: batch(size, length, "right", seed=seed)
        | {"decoder_input_ids": batch(size, 5, seed=seed)["input_ids"]},
    ),
    "Llama": (
        CASES["Llama"][0], lambda size, length, seed: batch(size, length, "right", seed=seed)
    ),
}  # fmt: skip


def trainer(model: Any) -> onward.Trainer:
    return onward.Trainer(model, onward.optim.AdamW())


def run(path: Path, dtype: str, feeds: dict[str, np.ndarray]) -> torch.Tensor:
    """The first output of an ONNX file, run by onnxruntime in fp16 and by onnx's evaluator in bf16,
    which onnxruntime lacks."""
    if dtype == "float16":
        options = ort.SessionOptions()
        options.log_severity_level = 3
        [y, *_] = ort.InferenceSession(str(path), options).run(None, feeds)
    else:
        with np.errstate(all="ignore"):
            session = ReferenceEvaluator(str(path), new_ops=[GatherElements])
            y = session.run(None, feeds)[0]  # type: ignore[index]
    return torch.from_numpy(np.asarray(y))


@pytest.mark.sample(4)
@EACH_LOW
@pytest.mark.parametrize("name", MODELS)
def test_a_low_file_is_as_near_as_autocast(name: str, dtype: str, tmp_path: Path) -> None:
    make, draw = MODELS[name]
    torch.manual_seed(0)
    model = make().eval()
    kept = [p.detach().clone() for p in model.parameters()]
    path = trainer(model).export_onnx(tmp_path / "m.onnx", batch=draw(4, 12, 1), dtype=dtype)
    onnx.checker.check_model(str(path), full_check=True)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), kept, strict=True))
    exact_model = copy.deepcopy(model).double()
    named = [i.name for i in onnx.load(str(path)).graph.input]
    ours, theirs = [], []
    for size, length in ((4, 12), (7, 5), (2, 33), (1, 1)):
        data = {k: v for k, v in draw(size, length, 9).items() if k in named}
        with torch.no_grad():
            exact = exact_model(**data).logits
            with torch.autocast("cpu", LOW[dtype]):
                auto = model(**data).logits
        found = run(path, dtype, {k: v.numpy() for k, v in data.items()})
        assert found.dtype == torch.float32
        ours.append(float((found.double() - exact).norm()))
        theirs.append(float((auto.double() - exact).norm()))
    assert 0 < rms(ours) <= 1.25 * rms(theirs)


@EACH_LOW
def test_products_and_tables_are_stored_low_and_norms_in_fp32(dtype: str, tmp_path: Path) -> None:
    model = gpt2()
    path = trainer(model).export_onnx(tmp_path / "m.onnx", batch=batch(), dtype=dtype)
    found = {i.name: i for i in onnx.load(str(path)).graph.initializer}
    for name, p in model.named_parameters():
        low = ".ln_" not in name
        assert found[name].data_type == (STORED[dtype] if low else onnx.TensorProto.FLOAT), name
        if low:
            held = onnx.numpy_helper.to_array(found[name]).astype(np.float32)
            assert torch.equal(torch.from_numpy(held), p.detach().to(LOW[dtype]).float()), name
    assert sum(list(i.dims) == [VOCABULARY, 32] for i in found.values()) == 1, "tied: once"
    weights = sum(p.nbytes for p in model.parameters())
    assert path.stat().st_size < weights / 2 + 64 * 1024


@EACH_LOW
def test_floating_inputs_and_outputs_stay_fp32(dtype: str, tmp_path: Path) -> None:
    model = mlp()
    made = onward.Trainer(model, onward.optim.AdamW(), loss_fn=nn.functional.cross_entropy)
    data = (torch.randn(6, 8), torch.arange(6) % 5)
    path = made.export_onnx(tmp_path / "m.onnx", batch=data, dtype=dtype)
    graph = onnx.load(str(path)).graph
    for item in (*graph.input, *graph.output):
        assert item.type.tensor_type.elem_type == onnx.TensorProto.FLOAT
    x = torch.randn(11, 8)
    got = run(path, dtype, {graph.input[0].name: x.numpy()})
    torch.testing.assert_close(got, model.eval()(x).detach(), rtol=0.03, atol=0.01)
    assert not torch.equal(got, model(x).detach())


class Both(nn.Module):
    """A weight that a product reads and a norm too, and an output that is a weight's view."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 8))
        self.table = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x @ self.w + torch.softmax(self.w, -1).sum(0), self.table.t()


@EACH_LOW
def test_what_fp32_reads_too_stays_fp32(dtype: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Both(), torch.randn(3, 8)
    made = onward.Trainer(model, onward.optim.AdamW(), loss_fn=lambda y, t: (y[0] - t).sum())
    path = made.export_onnx(tmp_path / "m.onnx", batch=(x, x), dtype=dtype)
    stored = {i.name: i.data_type for i in onnx.load(str(path)).graph.initializer}
    assert stored["w"] == stored["table"] == onnx.TensorProto.FLOAT
    name = onnx.load(str(path)).graph.input[0].name
    got = run(path, dtype, {name: x.numpy()})
    torch.testing.assert_close(got, model(x)[0].detach(), rtol=0.03, atol=0.05)


def test_default_is_what_there_was(tmp_path: Path) -> None:
    model = gpt2(layers=1)
    made = trainer(model)
    plain = made.export_onnx(tmp_path / "a.onnx", batch=batch())
    named = made.export_onnx(tmp_path / "b.onnx", batch=batch(), dtype="float32")
    assert plain.read_bytes() == named.read_bytes()
    assert STORED["float16"] not in {i.data_type for i in onnx.load(str(plain)).graph.initializer}


@pytest.mark.parametrize("dtype", ["fp16", "float64", "", None, torch.float16, 16])
def test_another_type_is_refused(dtype: Any, tmp_path: Path) -> None:
    with pytest.raises(OnwardError, match=r"not a dtype of export_onnx; fix: one of float32, "):
        trainer(gpt2(layers=1)).export_onnx(tmp_path / "m.onnx", batch=batch(), dtype=dtype)
    assert not list(tmp_path.iterdir())


def test_a_weight_that_fp16_has_not_is_refused(tmp_path: Path) -> None:
    model: Any = gpt2(layers=1)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[0, 0] = 1e5
    made = trainer(model)
    with pytest.raises(
        OnwardError, match=r"h\.0\.mlp\.c_fc\.weight has 1e\+05, which float16 cannot"
    ):
        made.export_onnx(tmp_path / "m.onnx", batch=batch(), dtype="float16")
    assert not list(tmp_path.iterdir())
    path = made.export_onnx(tmp_path / "m.onnx", batch=batch(), dtype="bfloat16")
    [held] = [
        onnx.numpy_helper.to_array(i)
        for i in onnx.load(str(path)).graph.initializer
        if i.name == "transformer.h.0.mlp.c_fc.weight"
    ]
    assert float(held.view(bfloat16)[0, 0]) == float(torch.tensor(1e5).bfloat16())
