"""Ops that write in place, through views of every kind: loss and gradients are eager's."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import tiny
import torch
from tiny_families import assert_same
from torch import nn
from torch.nn import functional as F

from onward.capture import CaptureRequest, capture
from onward.errors import CaptureError

View = Callable[[torch.Tensor], torch.Tensor]  # of f32[B,4,6]

VIEWS: dict[str, View] = {
    "itself": lambda y: y,
    "the same": lambda y: y.float(),
    "contiguous": lambda y: y.contiguous(),
    "alias": lambda y: y[:],
    "rows": lambda y: y[:, 1:3],
    "last rows": lambda y: y[:, -2:],
    "columns": lambda y: y[..., :3],
    "a row": lambda y: y[:, 2],
    "a last column": lambda y: y[..., -1],
    "an element": lambda y: y[0, 1, 2],
    "a sample": lambda y: y[0],
    "a step": lambda y: y[:, ::2],
    "a step of three, from the second": lambda y: y[..., 1::3],
    "a step of a transposed": lambda y: y.transpose(1, 2)[:, 1:5:2],
    "diagonal": lambda y: y.diagonal(0, 1, 2),
    "a lower diagonal": lambda y: y.diagonal(-1, 2, 1),
    "narrow": lambda y: y.narrow(2, 1, 4),
    "transposed": lambda y: y.transpose(1, 2),
    "mT": lambda y: y.mT,
    "permuted": lambda y: y.permute(2, 0, 1),
    "moved": lambda y: y.movedim(0, 2),
    "view": lambda y: y.view(y.shape[0], 24),
    "flattened": lambda y: y.flatten(0, 1),
    "unflattened": lambda y: y.unflatten(2, (3, 2)),
    "reshaped": lambda y: y.reshape(-1, 3),
    "reshaped copy": lambda y: y.transpose(0, 2).reshape(-1),
    "contiguous copy": lambda y: y.transpose(0, 2).contiguous(),
    "unsqueezed": lambda y: y.unsqueeze(1),
    "squeezed": lambda y: y.unsqueeze(1).squeeze(1),
    "expanded to its shape": lambda y: y.expand(-1, -1, -1),
    "row of a transposed": lambda y: y.transpose(1, 2)[:, 1:][:, 0],
    "part of a part": lambda y: y[:, 1:][..., 2:5].transpose(1, 2)[:, :2],
}
# Views of which autograd lets nothing be written: of tensors without gradients.
PIECES: dict[str, View] = {
    "of split": lambda y: y.split(2, dim=1)[1],
    "of split sizes": lambda y: y.split([1, 3, 2], -1)[1],
    "of chunk": lambda y: y.chunk(3, -1)[2],
    "of unbind": lambda y: y.unbind(1)[3],
    "chunk of a view": lambda y: y.view(-1, 6).chunk(2, 1)[0][1:],
}
Write = Callable[[torch.Tensor], object]
WRITES: dict[str, Write] = {
    "mul_": lambda v: v.mul_(1.5),
    "add_ of a computed": lambda v: v.add_(v.detach().sin(), alpha=0.5),
    "zero_": lambda v: v.zero_(),
    "assigned": lambda v: v.copy_(v.detach().cos()),
    "masked_fill_": lambda v: v.masked_fill_(v > 0.5, 0.25),
    "dropout that is off": lambda v: F.dropout(v.mul_(0.5), 0.5, False, inplace=True).add_(1.0),
    "pow_ of a computed": lambda v: v.pow_(v.detach().abs().ceil()),
    "pow_": lambda v: v.pow_(3),
    "twice": lambda v: v.div_(2.0).add_(v[..., :1].clone() if v.dim() else 1.0),
}


class InPlace(nn.Module):
    """Reads the tensor, the view that was written, and views taken before and after."""

    def __init__(self, view: View, write: Write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.view, self.write = nn.Parameter(torch.randn(6, 6)), view, write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin() if self.view in PIECES.values() else x @ self.w + x
        first, flat = y[:, :1].transpose(1, 2), y.view(-1)
        piece = y[..., 3:].reshape(-1, 3)  # a copy
        z = y * 1.0  # read before
        view = self.view(y)
        self.write(view)
        found = [y, first, flat, piece, z, view, y[:, 3:], flat[2:7]]
        # absolute values: where terms cancel, the sum's rounding says nothing about its value
        return sum(
            (t * torch.arange(t.shape[-1] if t.dim() else 1)).abs().mean() for t in found
        ) + (y @ self.w).abs().sum().mul(0.1)


ALL = {**VIEWS, **PIECES}
CASES = list(itertools.product(ALL, WRITES))


@pytest.mark.sample(6)
@pytest.mark.parametrize(("view", "write"), CASES, ids=map("-".join, CASES))
def test_a_write_is_seen_by_every_name(view: str, write: str) -> None:
    model = InPlace(ALL[view], WRITES[write])
    x = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(1))
    assert_same([tiny.gradients(model, {"x": x})], model, [{"x": x}])


REFUSED: dict[str, View] = {
    "expanded": lambda y: y[:, :1].expand(-1, 3, -1),
    "windows": lambda y: y.unfold(1, 2, 1),
    "detached": lambda y: y.detach(),
}


@pytest.mark.parametrize("view", REFUSED)
def test_other_views_are_refused(view: str) -> None:
    model = InPlace(REFUSED[view], lambda v: v.mul_(1.5))
    with pytest.raises(CaptureError, match=r"another tensor shares; fix: use"):
        capture(CaptureRequest(model, (), {"x": torch.randn(3, 4, 6)}))


# Ops that change sizes and strides of a tensor where it stands, and leave what it holds.
RESHAPES: dict[str, Write] = {
    "t_": lambda v: v.t_(),
    "transpose_": lambda v: v.transpose_(0, 1),
    "swapaxes_": lambda v: v.swapaxes_(0, 1),
    "swapdims_": lambda v: v.swapdims_(0, 1),
    "unsqueeze_": lambda v: v.unsqueeze_(0),
    "squeeze_": lambda v: v.squeeze_(),
    "detach_": lambda v: v.detach_(),
    "t_, then mul_": lambda v: v.t_().mul_(2),
    "mul_, then t_": lambda v: v.mul_(2).t_(),
    "unsqueeze_, then a row of it": lambda v: v.unsqueeze_(0)[0, :1].mul_(2),
}
MATRICES: dict[str, View] = {  # of f32[B,6]
    "itself": lambda y: y,
    "alias": lambda y: y[:],
    "rows": lambda y: y[:2],
    "transposed": lambda y: y.t(),
    "view": lambda y: y.view(-1, 3),
    "a clone": lambda y: y.clone(),
}


class Reshaped(nn.Module):
    """Reads the tensor whose sizes were changed, what it shows, and views from before."""

    def __init__(self, view: View, change: Write) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.view, self.change = nn.Parameter(torch.randn(6, 6)), view, change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.w
        before, view = y[1:], self.view(y)
        self.change(view)
        found = [y, before, view, view * 2]
        each = [(t.flatten() * torch.arange(t.numel())).mean() * (t.dim() + 1) for t in found]
        return torch.stack(each).sum()


@pytest.mark.sample(4)
@pytest.mark.parametrize("change", RESHAPES)
@pytest.mark.parametrize("view", MATRICES)
def test_sizes_change_in_place(view: str, change: str) -> None:
    model, x = Reshaped(MATRICES[view], RESHAPES[change]), torch.randn(4, 6)
    try:
        tiny.eager(model, {"x": x}, torch.float32)
    except RuntimeError as error:
        pytest.skip(f"eager: {error}")
    assert_same([tiny.gradients(model, {"x": x})], model, [{"x": x}])


class OfGiven(nn.Module):
    def __init__(self, which: str) -> None:
        super().__init__()
        self.w, self.which = nn.Parameter(torch.randn(6, 6)), which
        self.table: torch.Tensor
        self.register_buffer("table", torch.randn(4, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        {"input": x, "buffer": self.table, "view of an input": x[:3]}[self.which].t_()
        return (x * x).sum() + (self.table @ self.w if self.table.shape[1] == 6 else self.w).sum()


@pytest.mark.parametrize("which", ["input", "buffer"])
def test_a_given_tensor_keeps_its_sizes(which: str) -> None:
    with pytest.raises(CaptureError, match="changes the shape of an input of the forward"):
        capture(CaptureRequest(OfGiven(which), (), {"x": torch.randn(4, 6)}))


def test_a_view_of_a_given_tensor_may_change_them() -> None:
    model, x = OfGiven("view of an input"), torch.randn(4, 6)
    assert_same([tiny.gradients(model, {"x": x})], model, [{"x": x}])


Given = Callable[[nn.Parameter, torch.Tensor, torch.Tensor], torch.Tensor]


def _within(y: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
    """A table's rows are its sums, as if a module without gradients added to what it is given."""
    with torch.no_grad():
        y += 2
        return y.sum(0) + sum(o.sum(0) for o in others)


def _nested(y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y *= 2
        with torch.enable_grad():
            y += 1
        return y.sum(0)


def _returned(y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y += 2
        return y


def _numbers_read_later(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    y = (x * 2).long()
    return _within(y) * w + y.sum(0)


# What a part without gradients is given and writes into: f32[4,6], made of x f32[4,6]; w f32[6].
OF_REGIONS: dict[str, Given] = {
    "its own": lambda w, x, b: _within(x * 2) * w,
    "a view": lambda w, x, b: _within((x * 2).t().t()) * w,
    "numbers, returned": lambda w, x, b: w * _returned((x * 2).long()).sum(0),
    "numbers, read later": lambda w, x, b: _numbers_read_later(w, x),
    "made of a table": lambda w, x, b: _within(torch.arange(24.0).view(4, 6)) * w * x.sum(),
}


def _read_later(w: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x * w
    return _within(y) * w + y.sum(0)


def _base_read_later(w: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return _within(y.view(2, 12).view(4, 6)) * w + y.sum(0)


def _view_read_later(w: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y[1]
    return _within(y) * w + z


def _two_names(w: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = y[:, :]
    return _within(y, z) * w


def _written_again(w: torch.Tensor, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = x * 2
    z = _returned(y)
    return (_returned(z) * w).sum(0) + y.sum(0)


READ_LATER: dict[str, Given] = {
    "itself": _read_later,
    "its base": _base_read_later,
    "a view of it": _view_read_later,
    "two names": _two_names,
    "written again": _written_again,
    "returned": lambda w, x, b: (_returned(x * w) * w).sum(0),
    "the batch's": lambda w, x, b: _within(x) * w,
    "a view of the batch's": lambda w, x, b: _within(x[:, :]) * w,
    "a buffer's row": lambda w, x, b: _within(b[:4]) * w + x.sum(0),
    "nested": lambda w, x, b: _nested(x * 2) * w,
}


class OfRegion(nn.Module):
    def __init__(self, made: Given) -> None:
        super().__init__()
        self.w, self.made = nn.Parameter(torch.linspace(-1, 1, 6)), made
        self.register_buffer("b", torch.linspace(0, 1, 30).view(5, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.b, torch.Tensor)
        return self.made(self.w, x, self.b).square().sum()


@pytest.mark.parametrize("name", OF_REGIONS)
def test_a_part_without_gradients_writes_into_what_it_alone_reads(name: str) -> None:
    model = OfRegion(OF_REGIONS[name])
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    assert_same([tiny.gradients(model, {"x": x.clone()})], model, [{"x": x.clone()}])


@pytest.mark.parametrize("name", READ_LATER)
def test_what_is_read_after_it_is_refused(name: str) -> None:
    model, x = OfRegion(READ_LATER[name]), torch.randn(4, 6)
    with pytest.raises(CaptureError, match="fix: "):
        capture(CaptureRequest(model, (), {"x": x}))
