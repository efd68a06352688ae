"""Gradients where nothing counts, or a scale is not finite: 0, a number, infinite or NaN, element
by element as eager PyTorch's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.nn import functional as F

import onward
from onward.options import TrainerOptions

ROWS, WIDTH, CLASSES = 6, 8, 5
Loss = Callable[[Any, Any, Any], Any]
Apart = Mapping[str, Sequence[tuple[int, int]]]
NOWHERE: Apart = {}


def kinds(x: torch.Tensor) -> torch.Tensor:
    """0 of zeros, 1 of other numbers, 2 of infinities, 3 of NaN. What is left where terms cancel
    counts as 0: it is rounding, a millionth of the largest number or less."""
    least = 1e-6 * x.nan_to_num(0.0, 0.0, 0.0).abs().max()
    finite = torch.where(x.isfinite(), (x.abs() > least).long(), 2)
    return torch.where(x.isnan(), 3, finite)


def labels(counted: int) -> torch.Tensor:
    out = torch.full((ROWS,), -100)
    out[:counted] = torch.arange(counted) % CLASSES
    return out


WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.25, 1.5])
NONE = torch.zeros(CLASSES)


def cross(z: Any, y: Any, **more: Any) -> Any:
    return F.cross_entropy(z, y, **more)


def masked(z: Any, y: Any) -> Any:
    """The mean over what counts, by a mask."""
    each = F.cross_entropy(z, y, reduction="none")
    return (each * (y != -100)).sum() / (y != -100).sum()


# from logits f[6,5], labels i64[6] and a number n
LOSSES: dict[str, Loss] = {
    "mean": lambda z, y, n: cross(z, y) + 0 * n,
    "sum over n": lambda z, y, n: cross(z, y, reduction="sum") / n,
    "sum times n": lambda z, y, n: cross(z, y, reduction="sum") * n,
    "none over n": lambda z, y, n: (cross(z, y, reduction="none") / n).sum(),
    "none, masked mean": lambda z, y, n: masked(z, y),
    "weighted mean": lambda z, y, n: cross(z, y, weight=WEIGHT),
    "weighted sum over n": lambda z, y, n: cross(z, y, weight=WEIGHT, reduction="sum") / n,
    "weights of 0": lambda z, y, n: cross(z, y, weight=NONE),
    "weights of 0, sum over n": lambda z, y, n: cross(z, y, weight=NONE, reduction="sum") / n,
    "smooth mean": lambda z, y, n: cross(z, y, label_smoothing=0.1),
    "smooth sum over n": lambda z, y, n: cross(z, y, label_smoothing=0.1, reduction="sum") / n,
    "smooth weighted sum over n": lambda z, y, n: (
        cross(z, y, weight=WEIGHT, label_smoothing=0.1, reduction="sum") / n
    ),
    "nll": lambda z, y, n: F.nll_loss(z.log_softmax(-1), y, reduction="sum") / n,
    "nll, mean": lambda z, y, n: F.nll_loss(z.log_softmax(-1), y),
    "chosen rows": lambda z, y, n: cross(z[y != -100], y[y != -100], reduction="sum") / n,
    "planes": lambda z, y, n: cross(z.T[None], y[None], reduction="sum") / n,
    "mse over n": lambda z, y, n: F.mse_loss(z, z.detach() * 0, reduction="sum") / n,
    "mse of itself over n": lambda z, y, n: F.mse_loss(z, z.detach(), reduction="sum") / n,
    "l1 of itself over n": lambda z, y, n: F.l1_loss(z, z.detach(), reduction="sum") / n,
    "smooth l1 of itself": lambda z, y, n: F.smooth_l1_loss(z, z.detach(), reduction="sum") / n,
    "huber of itself over n": lambda z, y, n: F.huber_loss(z, z.detach(), reduction="sum") / n,
    "bce over n": lambda z, y, n: (
        F.binary_cross_entropy_with_logits(z, (z > 0).float(), reduction="sum") / n
    ),
    "bce with weights of 0": lambda z, y, n: (
        F.binary_cross_entropy_with_logits(z, (z > 0).float(), weight=NONE, reduction="sum") / n
    ),
    "kl over n": lambda z, y, n: (
        # from another distribution: from its own, all that is left of a gradient is rounding
        F.kl_div(z.log_softmax(-1), (2 * z.detach()).softmax(-1), reduction="sum") / n
    ),
    "kl to zeros over n": lambda z, y, n: (
        F.kl_div(z.log_softmax(-1), z.detach() * 0, reduction="sum") / n
    ),
    "cosine over n": lambda z, y, n: (1 - F.cosine_similarity(z, z.detach() + 1)).sum() / n,
    "cosine of zeros": lambda z, y, n: F.cosine_similarity(z * 0, z).sum() / n,
    "norm of zeros": lambda z, y, n: (z * 0).norm() / n,
    "root of zeros": lambda z, y, n: (z * 0).sqrt().sum() / n,
    "masked sum over n": lambda z, y, n: (z * (y != -100)[:, None]).sum() / n,
    "masked fill over n": lambda z, y, n: z.masked_fill((y == -100)[:, None], 0.0).sum() / n,
    "where over n": lambda z, y, n: torch.where((y != -100)[:, None], z, 0.0).sum() / n,
    "relu over n": lambda z, y, n: F.relu(z).sum() / n,
    "softmax of what is hidden": lambda z, y, n: (
        z.masked_fill((y == -100)[:, None], -math.inf).softmax(-1).nan_to_num().pow(2).sum() / n
    ),
    "clamp over n": lambda z, y, n: z.clamp(-0.1, 0.1).sum() / n,
    "n at least 1": lambda z, y, n: cross(z, y, reduction="sum") / n.clamp(min=1),
    "max over n": lambda z, y, n: z.amax(-1).sum() / n,
    "slice over n": lambda z, y, n: z[:2].sum() / n,
    "picked over n": lambda z, y, n: z.gather(1, y.clamp(min=0)[:, None]).sum() / n,
    "norm over n": lambda z, y, n: F.layer_norm(z, (CLASSES,)).pow(2).sum() / n,
    "gelu over n": lambda z, y, n: F.gelu(z).sum() / n,
}


class Head(nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.head, self.loss = nn.Linear(WIDTH, CLASSES), loss

    def forward(self, x: Any, y: Any, n: Any) -> Any:
        return self.loss(self.head(self.norm(F.gelu(self.body(x)))), y, n)


def gradients(model: nn.Module, data: tuple[Any, ...], scale: float, low: bool) -> dict[str, Any]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        loss = model(*data)
    (loss * scale).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_alike(
    ours: dict[str, Any], theirs: dict[str, Any], said: str, apart: Apart = NOWHERE
) -> None:
    for name, g in theirs.items():
        mine, want = kinds(ours[name]), kinds(g)
        for other, eagers in apart.get(name, ()):
            # what differs is of these two kinds, and nothing else
            mine = torch.where((mine == other) & (want == eagers), want, mine)
        assert torch.equal(mine, want), (
            f"{said}: {name} {mine.flatten()[:8].tolist()}, eager {want.flatten()[:8].tolist()}"
        )


# rows that count, n, and what the loss is multiplied by outside
CASES = (
    (0, 0.0, 1.0), (0, 3.0, 1.0), (0, 3.0, math.inf), (0, 3.0, math.nan), (0, math.inf, 1.0),
    (2, 0.0, 1.0), (2, 3.0, 1.0), (2, 3.0, math.inf), (2, 3.0, math.nan), (2, math.inf, 1.0),
)  # fmt: skip
# Where kinds differ: loss -> tensor -> pairs of our kind and eager's.
# A head's weight, where its gradient is made ahead of the loss's own: what is not finite is NaN.
# Eager's rows of classes that no label names are sums of +-inf times x, infinite in those columns
# where all rows of x that count have one sign; x is not kept for the backward to look.
_AHEAD: Apart = {"head.weight": ((3, 2),)}
# The loss is (1 - y) x + log(1 + exp(-x)), and its gradient a sum of two terms, inf - inf; eager's
# is one, (sigmoid(x) - y) inf.
_TWO_TERMS: Apart = dict.fromkeys(("head.weight", "head.bias"), ((3, 2),))
# A row that a mask of the batch multiplies by 0 is left out, and what it holds is taken to be
# finite, the gradient that it gets as well (rewrite/rows/zeros.py): no 0 times inf there.
_ROWS_LEFT_OUT: Apart = {
    f"{part}.{name}": ((0, 3), (2, 3))
    for part in ("body", "norm", "head")
    for name in ("weight", "bias")
}
# Positions behind the last that counts: a query reads no key behind it, and rows that no loss reads
# are left out, gradients 0. Eager multiplies their attention weights, 0, by NaN.
_HIDDEN: Apart = {
    "transformer.wte.weight": _AHEAD["head.weight"],
    "transformer.wpe.weight": ((0, 3),),
}
APART: dict[str, Apart] = {
    "mean": _AHEAD,
    "sum over n": _AHEAD,
    "sum times n": _AHEAD,
    "none, masked mean": _AHEAD,
    "weighted mean": _AHEAD,
    "weighted sum over n": _AHEAD,
    "n at least 1": _AHEAD,
    "bce over n": _TWO_TERMS,
    "masked sum over n": _ROWS_LEFT_OUT,
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("native", [True, False], ids=["native", "aten"])
@pytest.mark.parametrize("loss", LOSSES)
def test_kinds_of_gradients_are_eagers(
    loss: str, native: bool, low: bool, build: Callable[[str], None]
) -> None:
    if not native:
        build("0")
    torch.manual_seed(0)
    model = Head(LOSSES[loss])
    ours = onward.accelerate(copy.deepcopy(model), strict=True)
    for counted, n, scale in CASES:
        data = torch.randn(ROWS, WIDTH), labels(counted), torch.tensor(n)
        said = f"{counted} rows count, n = {n}, scale {scale}"
        found, want = (gradients(m, data, scale, low) for m in (ours, model))
        usual = math.isfinite(scale) and math.isfinite(n) and n
        assert_alike(found, want, said, NOWHERE if usual else APART.get(loss, NOWHERE))


@pytest.mark.sample(3)
@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("native", [True, False], ids=["native", "aten"])
@pytest.mark.parametrize("name", ["mean", "sum over n", "weighted sum over n", "planes", "nll"])
def test_a_trainers_step_moves_what_eagers_moves(
    name: str, native: bool, low: bool, build: Callable[[str], None]
) -> None:
    """A whole step is one graph, where what the loss weighs is known before its gradient."""
    if not native:
        build("0")
    for counted, n, _ in CASES:
        torch.manual_seed(0)
        model = Head(LOSSES[name])
        before, twin = copy.deepcopy(model.state_dict()), copy.deepcopy(model)
        options = TrainerOptions(skip_nonfinite=False, mixed_precision="bf16" if low else "no")
        trainer = onward.Trainer(model, onward.optim.SGD(lr=1.0), options=options)
        data = torch.randn(ROWS, WIDTH), labels(counted), torch.tensor(n)
        trainer.train_step(*data)
        moved = {key: p.detach() - before[key] for key, p in model.named_parameters()}
        assert_alike(moved, gradients(twin, data, 1.0, low), f"{counted} rows count, n = {n}")


@pytest.mark.parametrize("native", [True, False], ids=["native", "aten"])
@pytest.mark.parametrize("items", [0, 5])
def test_a_language_model_without_a_label(
    items: int, native: bool, build: Callable[[str], None]
) -> None:
    if not native:
        build("0")
    model = tiny.gpt2(dropout=0.0)
    ours = onward.accelerate(copy.deepcopy(model), strict=True)
    for counted in (False, True):
        data = {**tiny.batch(), "num_items_in_batch": torch.tensor(items)}
        if not counted:
            data["labels"].fill_(-100)
        for m in (model, ours):
            m.zero_grad()
            m(**data).loss.backward()
        found, want = (
            {n: p.grad for n, p in m.named_parameters() if p.grad is not None}
            for m in (ours, model)
        )
        assert found.keys() == want.keys()
        said = f"labels {counted}, {items} items"
        if items:  # what is 0 by symmetry, such as a key's bias, is so to rounding
            assert all(g.isfinite().all() for g in (*found.values(), *want.values())), said
        else:
            assert_alike(found, want, said, _HIDDEN)
        for name, g in want.items():
            assert counted or (not found[name].any() and not g.any()), name
