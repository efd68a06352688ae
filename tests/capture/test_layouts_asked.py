"""A forward that branches on how a tensor lies in memory takes eager's branch, or runs in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onward
from onward.errors import EagerWarning

Made = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of w f[V,D], ids i64[B,T]

MADE: dict[str, Made] = {
    "index": lambda w, ids: w[ids],
    "embedding": lambda w, ids: F.embedding(ids, w),
    "index of two": lambda w, ids: w.expand(3, *w.shape)[:, ids][0],
    "index of columns": lambda w, ids: w.t()[:, ids],
    "index by a pair": lambda w, ids: w[ids, ids % 4],
    "take": lambda w, ids: w.take(ids),
    "product": lambda w, ids: w[ids] @ w[:4],
    "linear": lambda w, ids: F.linear(w[ids], w),
    "attention": lambda w, ids: F.scaled_dot_product_attention(w[ids], w[ids], w[ids]),
    "norm": lambda w, ids: F.layer_norm(w[ids], (4,)),
    "softmax": lambda w, ids: w[ids].softmax(1),
    "where": lambda w, ids: torch.where(ids[..., None] > 3, w[ids], 0.0),
    "cast": lambda w, ids: ids.float()[..., None] * w[0],
    "cat": lambda w, ids: torch.cat([w[ids], w[ids]], -1),
    "stack": lambda w, ids: torch.stack([ids, ids]).float() * w[0, 0],
    "like": lambda w, ids: torch.ones_like(ids, dtype=w.dtype) * w[0, 0],
    "dropout": lambda w, ids: F.dropout(w[ids], 0.0),
}
ASKED: dict[str, Callable[[torch.Tensor], Any]] = {
    "is_contiguous": lambda y: 2.0 if y.is_contiguous() else 0.5,
    "stride": lambda y: 2.0 if y.stride(0) >= y.stride(1) else 0.5,
    "strides": lambda y: 2.0 if y.stride()[0] == max(y.stride()) else 0.5,
    "dim_order": lambda y: 1.0 + y.dim_order()[0],
    "storage_offset": lambda y: 1.0 + y.storage_offset(),
}


class Asks(nn.Module):
    def __init__(self, made: str, asked: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(11, 4))
        self.made, self.asked = MADE[made], ASKED[asked]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y = self.made(self.weight, ids)
        return (y * self.asked(y)).pow(2).mean()


@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("made", MADE)
@pytest.mark.filterwarnings("ignore::onward.errors.EagerWarning")
def test_the_branch_is_eagers(made: str, asked: str, columns: bool) -> None:
    ids = torch.randint(0, 11, (3, 5))
    ids = ids.t().contiguous().t() if columns else ids
    eager = Asks(made, asked)
    ours = onward.accelerate(copy.deepcopy(eager))
    want, got = eager(ids), ours(ids)
    want.backward()
    got.backward()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(ours.weight.grad, eager.weight.grad)


# writes through a call that gives a view or a copy, and how a result shows them
WRITTEN: dict[str, Callable[[torch.Tensor], object]] = {
    "reshape": lambda y: y.reshape(-1).mul_(3.0),
    "torch.reshape": lambda y: torch.reshape(y, (-1,)).mul_(3.0),
    "a part": lambda y: y.reshape(-1)[:4].zero_(),
    "flatten": lambda y: y.flatten().mul_(3.0),
    "flatten of two dims": lambda y: y.flatten(0, 1).mul_(3.0),
    "torch.flatten": lambda y: torch.flatten(y).add_(1.0),
    "ravel": lambda y: y.ravel().mul_(3.0),
    "contiguous": lambda y: y.contiguous().mul_(3.0),
    "reshape_as": lambda y: y.reshape_as(torch.ones(y.numel())).mul_(3.0),
    "inplace": lambda y: F.relu(y.reshape(-1), inplace=True),
    "out": lambda y: torch.mul(y, 2.0, out=y.contiguous()),
    "setitem": lambda y: y.reshape(-1).__setitem__(slice(0, 3), 0.0),
    "by its source": lambda y: (z := y.flatten(), y.mul_(3.0), y.add_(z.sum())),
    "as_strided": lambda y: y.mul_(y.as_strided((1,), (1,), 1).clone()),
}
SOURCES: dict[str, Made] = {
    "product": lambda w, x: x * w[0],
    "clone": lambda w, x: x.clone() * w.sum(),
    "index": lambda w, x: w[(x[..., 0] > 0).long()],
    "transposed": lambda w, x: (x * w[0]).transpose(0, 1),
}


class Writes(nn.Module):
    def __init__(self, source: str, written: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(11, 4))
        self.source, self.written = SOURCES[source], WRITTEN[written]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.source(self.weight, x)
        with torch.no_grad():
            self.written(y)
        return y.pow(2).mean() + self.weight.sum()


@pytest.mark.parametrize("first", ["rows", "columns"])
@pytest.mark.parametrize("written", WRITTEN)
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.filterwarnings("ignore::onward.errors.EagerWarning")
def test_writes_reach_what_they_reach_in_eager(source: str, written: str, first: str) -> None:
    """Writes reach the same tensors as in eager, whatever layout the model was captured with."""
    torch.manual_seed(1)
    rows = torch.randn(3, 5, 4)
    columns = rows.transpose(0, 1).contiguous().transpose(0, 1)
    eager = Writes(source, written)
    ours = onward.accelerate(copy.deepcopy(eager))
    order = (rows, columns) if first == "rows" else (columns, rows)
    for x in (*order, rows):
        torch.testing.assert_close(ours(x), eager(x))


def test_a_model_that_only_reshapes_is_captured_once(captures: list[int]) -> None:
    """Reshapes and a write in place do not make a capture depend on the batch's memory layout."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.line(x).reshape(-1, 4).contiguous().flatten()
            z = self.line(x) * 2.0
            z += 1.0
            return y.mean() + z.mean()

    model, x = onward.accelerate(Net()), torch.randn(3, 5, 4)
    for given in (x, x.transpose(0, 1).contiguous().transpose(0, 1), x):
        model(given)
    assert len(captures) == 1


def test_what_a_trace_answers_otherwise_is_said() -> None:
    """A trace that answers differently from eager is reported: fake tensors of torch 2.13 have
    other strides where an index is transposed."""
    ids = torch.randint(0, 11, (3, 5)).t().contiguous().t()
    model = onward.accelerate(Asks("index", "is_contiguous"))
    try:
        with pytest.warns(EagerWarning, match=r"memory layout \(is_contiguous\(\)\)"):
            model(ids)
    except pytest.fail.Exception:
        with torch._subclasses.FakeTensorMode() as mode:
            fake = mode.from_tensor(torch.ones(11, 4))[mode.from_tensor(ids)]
        assert fake.stride() == torch.ones(11, 4)[ids].stride(), "then nothing is to be said"


def test_a_write_into_a_mask_that_chooses_samples_is_captured() -> None:
    """A mask of samples that is written in place, as models of images write it, does not make the
    capture depend on memory layouts: it is not the forward that reshapes it."""

    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.patches = nn.Conv2d(3, 4, 2, stride=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.view(-1, *x.shape[2:])  # f32[B*N,3,H,W], where images of zeros are padding
            real = (x == 0.0).sum(dim=(-1, -2, -3)) != x.shape[1:].numel()
            real[0] |= ~torch.any(real)
            x = x[real].contiguous()
            return self.patches(x).flatten(2).transpose(1, 2).reshape(-1, 4).tanh().sum(1).mean()

    eager = Images()
    ours = onward.accelerate(copy.deepcopy(eager))
    for given in torch.randn(2, 2, 2, 3, 4, 4):
        eager.zero_grad()
        ours.zero_grad()
        want, got = eager(given), ours(given)
        want.backward()
        got.backward()
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(ours.patches.weight.grad, eager.patches.weight.grad)
