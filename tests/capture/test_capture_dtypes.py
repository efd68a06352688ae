"""Indices, labels and models of every dtype: eager's numbers, or one clear line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import nn

import onward
from onward.errors import OnwardError

WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
CLASSES = 5


class Indexed(nn.Module):
    """`op(weight, index)`, and a sum of its squares as the loss."""

    def __init__(self, op: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.op = op
        self.w = nn.Parameter(torch.randn(CLASSES, 6))
        self.head = nn.Linear(6, CLASSES)
        self.x = nn.Parameter(torch.randn(8, 6))

    def forward(self, i: torch.Tensor) -> torch.Tensor:
        return self.op(self, i).square().sum()


def cross_entropy(**options: Any) -> Callable[[Indexed, torch.Tensor], torch.Tensor]:
    return lambda m, i: nn.functional.cross_entropy(m.head(m.x), i, **options)


OPS = {
    "embedding": lambda m, i: nn.functional.embedding(i, m.w),
    "embedding, padding": lambda m, i: nn.functional.embedding(i, m.w, padding_idx=1),
    "index": lambda m, i: m.w[i],
    "two indices": lambda m, i: m.w[i, i],
    "index_select": lambda m, i: m.w.index_select(0, i),
    "gather": lambda m, i: m.x.gather(1, i[:, None]),
    "cross entropy": cross_entropy(),
    "cross entropy, smoothed": cross_entropy(label_smoothing=0.1),
    "cross entropy, each": cross_entropy(reduction="none"),
    "cross entropy, another ignored": cross_entropy(ignore_index=1),
    "cross entropy, weighed": lambda m, i: nn.functional.cross_entropy(
        m.head(m.x), i, m.w[:, 0].detach().abs()
    ),
}


def index(dtype: torch.dtype) -> torch.Tensor:
    """The sixth is ignored, where the dtype has a number for it. Memory behind it is not zero."""
    numbers = torch.tensor([0, 1, 4, 2, 3, 1, 2, 4])
    return (numbers % 2 if dtype == torch.bool else numbers).to(dtype)


@pytest.mark.parametrize("dtype", WHOLE, ids=str)
@pytest.mark.parametrize("name", OPS)
@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
def test_indices_and_labels_are_read_as_what_they_are(name: str, dtype: torch.dtype) -> None:
    model, data = Indexed(OPS[name]), {"i": index(dtype)}
    try:
        want = tiny.eager(model, data, torch.float32)
    except (RuntimeError, IndexError):
        with pytest.raises(OnwardError):
            tiny.gradients(model, data)
        return
    try:
        have = tiny.gradients(model, data)
    except OnwardError as error:
        assert dtype not in (torch.int64, torch.int32), error
        assert "\n" not in str(error)
        return
    assert {n.replace("param.", "") for n in have} == set(want)
    for key, value in have.items():
        torch.testing.assert_close(value, want[key.replace("param.", "")], rtol=1e-5, atol=1e-5)


class Mixed(nn.Module):
    """A part of a model in this precision, or a buffer of it."""

    def __init__(self, dtype: torch.dtype, part: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dtype, self.part = dtype, part
        self.inner, self.outer = nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer("scale", torch.ones(8))
        match part:
            case "model":
                self.to(dtype)
            case "module":
                self.inner.to(dtype)
            case "buffer":
                self.get_buffer("scale").data = self.get_buffer("scale").to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.part == "within":
            return self.outer((x.to(self.dtype) * 2).float()).square().mean()
        x = x.to(self.inner.weight.dtype)
        y = (self.inner(x) * self.get_buffer("scale")).to(self.outer.weight.dtype)
        return self.outer(y).square().mean()


@pytest.mark.parametrize("part", ["model", "module", "buffer", "batch", "within"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_is_refused_in_one_line(dtype: torch.dtype, part: str) -> None:
    model = Mixed(dtype, part)
    x = torch.randn(4, 8, dtype=dtype if part in ("model", "batch") else torch.float32)
    model(x).backward()  # eager can
    model.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    trainer = onward.Trainer(model, onward.optim.AdamW(lr=0.1))
    with pytest.raises(
        OnwardError, match=r"is of torch\.b?float16.*; fix: model\.float\(\)"
    ) as error:
        trainer.train_step(x)
    assert "\n" not in str(error.value)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_model_of_doubles_is_refused_in_one_line() -> None:
    trainer = onward.Trainer(tiny.gpt2(0.0, layers=1).double(), onward.optim.SGD(lr=0.1))
    with pytest.raises(OnwardError, match=r"is of torch\.float64.*; fix: model\.float\(\)$"):
        trainer.train_step(tiny.batch(4, 12, "right"))


# ---- arithmetic on whole numbers: the kernels for floats are not for them


ARITHMETIC: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda k: k.sum(),
    "sum of rows": lambda k: k.sum(0),
    "sum of rows, kept": lambda k: k.sum(0, keepdim=True),
    "sum of columns": lambda k: k.sum(1),
    "sum of both": lambda k: k.sum((0, 1)),
    "sum of bools": lambda k: (k > 0).sum(0),
    "matmul": lambda k: k @ k.t(),
    "batched matmul": lambda k: k[None].expand(2, -1, -1) @ k.t()[None].expand(2, -1, -1),
    "linear": lambda k: F.linear(k, k),
    "product of counts": lambda k: (k > 0).long() @ (k > 0).long().t(),
    "amax": lambda k: k.amax(0),
    "cumsum": lambda k: k.cumsum(0),
    "maximum": lambda k: torch.maximum(k, 2 * k - 1),
    "abs": lambda k: k.abs(),
    "clamp": lambda k: k.clamp(0, 1),
    "power": lambda k: k**2,
    "square": lambda k: k.square(),
    "quotient": lambda k: k / 2,
    "where": lambda k: torch.where(k > 0, k, -k),
    "concatenated": lambda k: torch.cat([k, k]),
    "gathered": lambda k: k.gather(1, k.clamp(0, 3).long()),
    "indexed": lambda k: k[k[:, 0].long()],
}


class OfWholeNumbers(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.1, 0.8, 8))
        self.function = function

    def forward(self, k: torch.Tensor) -> torch.Tensor:
        return (self.weight.sum() * self.function(k)).float().mean()


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("name", ARITHMETIC)
def test_arithmetic_on_whole_numbers_is_eagers(name: str, dtype: torch.dtype) -> None:
    model = OfWholeNumbers(ARITHMETIC[name])
    k = torch.randint(-2, 4, (5, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    want = model(k).item()
    found = onward.Trainer(model, onward.optim.SGD(lr=0.1)).train_step(k).loss
    assert want != 0 and float(found) == pytest.approx(want, rel=1e-5)


def test_a_model_on_several_devices_is_refused_in_one_line() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).to("meta"))
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.1), lambda y, _: y.mean())
    with pytest.raises(OnwardError, match=r"0\.weight on cpu, 1\.weight on meta.*fix: model\.to"):
        trainer.train_step({"input": torch.ones(4, 3), "labels": torch.ones(4)})
