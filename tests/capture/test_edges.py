"""Calls at the edges of what their ops are defined on, and masks in any place of an index: value
and gradient are eager's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import l1_loss

import onward

T = torch.tensor
functional: Any = F  # torch's types lack the weight of these losses
plain_l1: Any = l1_loss
INF = math.inf
generator = torch.Generator().manual_seed(0)


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


MASKS = {
    3: T([True, False, True]), 4: T([True, False, True, False]),
    34: T([[True, False, False, True], [False, True, True, False], [True, True, False, False]]),
}  # fmt: skip
Index = Any
INDICES: dict[str, Index] = {
    "m3": (slice(None), MASKS[3]), "m4": (slice(None), slice(None), MASKS[4]),
    "... m4": (..., MASKS[4]), "m34": (slice(None), MASKS[34]), "... m34": (..., MASKS[34]),
    "m3, 1": (slice(None), MASKS[3], 1), "0, :, m4": (0, slice(None), MASKS[4]),
    "m3, :": (slice(None), MASKS[3], slice(None)),
}  # fmt: skip


def put(index: Index) -> Callable[[Tensor], Tensor]:
    def written(x: Tensor) -> Tensor:
        y = x * 1.0
        y[index] = 0.5
        return y

    return written


def sampled(mode: str, padding: str, aligned: bool, shift: float) -> Callable[[Tensor], Tensor]:
    """A spatial transformer of images, at the identity for no shift."""

    def sample(x: Tensor) -> Tensor:
        theta = T([[[1.0, 0.0, shift], [0.0, 1.0, -shift]]])
        grid = F.affine_grid(theta, [1, 1, 9, 10], align_corners=aligned)
        return F.grid_sample(x, grid + 0 * x.sum(), mode, padding, aligned)

    return sample


P, Y = T([0.0, 1.0, 1e-30, 0.3, 1.0, 0.0, 0.5]), T([1.0, 0.0, 1.0, 0.2, 1.0, 0.0, 0.0])
A, B, W = drawn(5, 4), drawn(5, 4), torch.rand(5, 4, generator=generator)
ROWS = T([True, False, True, True, False])
SIGNED = [-INF, -3.0, -1.0, -0.0, 0.0, 1.0, 3.0, INF]
LEGS = T([[y, x] for y in SIGNED for x in SIGNED])
H = T([[2.0, 1.0, 0.0], [0.1, 0.2, 0.3]])
FORMS: dict[str, tuple[Callable[[Tensor], Tensor], Tensor]] = {
    **{f"write where {name}": (put(index), drawn(2, 3, 4)) for name, index in INDICES.items()},
    **{
        f"binary cross-entropy, {r}": (lambda p, r=r: F.binary_cross_entropy(p, Y, reduction=r), P)
        for r in ("mean", "sum", "none")
    },
    "of a saturated sigmoid": (
        lambda x: F.binary_cross_entropy(torch.sigmoid(x), T([0.0, 1.0, 1.0, 0.0, 0.5])),
        T([200.0, -200.0, 200.0, -120.0, 20.0]),
    ),
    "binary cross-entropy, weighed": (lambda p: F.binary_cross_entropy(p, Y, Y + 0.5), P),
    **{
        f"l1, weighed, {r}": (lambda x, r=r: functional.l1_loss(x, B, weight=W, reduction=r), A)
        for r in ("mean", "sum", "none")
    },
    "l1": (lambda x: F.l1_loss(x, B), A),
    "l1 of rows, weighed": (lambda x: functional.l1_loss(x[ROWS], B[ROWS], weight=W[ROWS]), A),
    "mse of rows, weighed": (lambda x: functional.mse_loss(x[ROWS], B[ROWS], weight=W[ROWS]), A),
    "huber of rows": (lambda x: functional.huber_loss(x[ROWS], B[ROWS], weight=W[ROWS]), A),
    "atan2": (lambda x: torch.atan2(*x.detach().T) + 0 * x.nan_to_num(0, 0, 0).sum(), LEGS),
    "atan2, slopes": (lambda x: torch.atan2(*x.T), T([[-3.0, 1.0], [2.0, -0.5], [1e-3, -4.0]])),
    "margins met": (lambda h: F.multi_margin_loss(h, T([0, 2])), H),
    "margins met, squared": (lambda h: F.multi_margin_loss(h, T([0, 2]), p=2), H),
    "margins, weighed": (
        lambda h: F.multi_margin_loss(h, T([0, 2]), weight=T([1.0, 2.0, 3.0]), reduction="none"), H,
    ),
    "counts at edges": (
        lambda x: torch.histc(x.detach(), 10, 0, 3) + 0 * x.sum(), torch.arange(11) * 0.3
    ),
    "between equal bounds": (lambda x: torch.clamp(x[0], x[1], x[1] * 1), T([[-5.0, 2], [0, 1]])),
    "between bounds": (
        lambda x: torch.clamp(x[0], x[1], x[2]), T([[-5.0, 2, 3], [0, 0, 1], [1, 1, 1]])
    ),
    "bounds that are NaN": (
        lambda x: torch.clamp(x[0], x[1], x[2]).isnan() * x[0],
        T([[-5.0, 2, 3, 1], [torch.nan, 0, torch.nan, 0], [1, torch.nan, torch.nan, 2]]),
    ),
    **{
        f"cosines, {eps}": (lambda x, eps=eps: F.cosine_similarity(x, B * 0.3, eps=eps), A * 0.3)
        for eps in (1.0, 0.1, 1e-8)
    },
    "cosines of pairs": (lambda x: F.cosine_similarity(x[:, None], B[None], dim=-1), A),
    **{
        f"{mode}, {padding}, {aligned}, {shift}": (
            sampled(mode, padding, aligned, shift), drawn(1, 2, 6, 5)
        )
        for mode in ("bilinear", "nearest") for padding in ("zeros", "border", "reflection")
        for aligned in (True, False) for shift in (0.0, 0.27)
    },
    "bicubic": (sampled("bicubic", "zeros", False, 0.27), drawn(1, 2, 6, 5)),
}  # fmt: skip


class Form(nn.Module):
    """The weighed sum of a form of a parameter that is added to the batch."""

    def __init__(self, form: Callable[[Tensor], Tensor], x: Tensor) -> None:
        super().__init__()
        self.form, self.shift = form, nn.Parameter(torch.full_like(x, -0.0))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.form(x + self.shift).flatten()
        return {"loss": (y * torch.cos(torch.arange(y.numel()) * 0.7 + 0.3)).sum()}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FORMS)
def test_edges_are_eagers(name: str) -> None:
    form, x = FORMS[name]
    model = Form(form, x)
    eager = copy.deepcopy(model)
    want = eager(x)["loss"]
    want.backward()
    trainer = onward.Trainer(model, onward.optim.SGD(lr=1.0), options={"strict": True})
    torch.testing.assert_close(trainer.train_step({"x": x}).loss, want.detach())
    assert eager.shift.grad is not None
    torch.testing.assert_close(-model.shift.detach(), eager.shift.grad)


@pytest.mark.parametrize(
    "form",
    [lambda u: u != -1, lambda u: u > -1, lambda u: u + 300, lambda u: u.int() + 2**31],
    ids=["unequal", "more", "sum", "i32"],
)
def test_numbers_that_a_type_has_not_are_refused(form: Callable[[Tensor], Tensor]) -> None:
    u = T([1, 2, 255], dtype=torch.uint8)
    model = Form(lambda x: form(u) * x, torch.ones(3))
    trainer = onward.Trainer(model, onward.optim.SGD(lr=1.0), options={"strict": True})
    with pytest.raises(onward.CaptureError, match="out of bounds for"):
        trainer.train_step({"x": torch.ones(3)})


def test_a_weight_that_a_function_mode_would_forget_is_refused() -> None:
    model = Form(lambda x: plain_l1(x, B, weight=W), A)
    trainer = onward.Trainer(model, onward.optim.SGD(lr=1.0), options={"strict": True})
    with pytest.raises(onward.CaptureError, match="l1_loss of a function mode forgets its weight"):
        trainer.train_step({"x": A})
