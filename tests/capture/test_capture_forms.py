"""Ops in the spellings that models use, beside eager: keywords and places, negative dims, dtypes of
indices, ties and zeros; one capture serves two batch sizes where its sizes may vary."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch import nn

Form = Callable[[torch.Tensor, torch.Tensor], Any]  # of x f[B,4,5] and i i64[B,4] in 0..4
FIVE = torch.tensor([0, 3, 3, 1, 0])


def wide(i: torch.Tensor) -> torch.Tensor:
    return i.unsqueeze(-1).expand(-1, -1, 5) % 4


def steps(x: torch.Tensor) -> torch.Tensor:
    """Numbers many of which are equal, some 0, with x's gradient."""
    return x + ((x * 2).round() / 2 - x).detach()


def holes(x: torch.Tensor) -> torch.Tensor:
    """x with an element of its second row that is no number."""
    gap = torch.zeros(4, 5)
    gap[1, 2], gap[3, :] = torch.nan, torch.tensor([0.0, torch.nan, 0.0, 0.0, 0.0])
    return torch.where(gap.isnan(), gap, x)


def hidden(x: torch.Tensor) -> torch.Tensor:
    """x with -inf in some places, in one row and one column everywhere."""
    gap = torch.zeros(4, 5, dtype=torch.bool)
    gap[1], gap[:, 3], gap[0, 0] = True, True, True
    return x.masked_fill(gap, -torch.inf)


def bag(x: torch.Tensor) -> torch.Tensor:
    """A table f[20,5]."""
    return x[:1].reshape(4, 5).repeat(5, 1) * torch.linspace(-1, 1, 20).unsqueeze(1)


FORMS: dict[str, Form] = {
    **{
        f"scatter_reduce {kind} {'with' if own else 'without'} own, dim {dim}": (
            lambda x, i, kind=kind, own=own, dim=dim: steps(x).scatter_reduce(
                dim, wide(i), steps(x * 0.7), kind, include_self=own
            )
        )
        for kind in ("sum", "mean", "prod", "amax", "amin")
        for own in (True, False)
        for dim in (1, -2)
    },
    "scatter_reduce by keyword, of a part": lambda x, i: x.scatter_reduce(
        dim=-1, index=wide(i)[:, :2, :3], src=x[:, :2, :3] * 2, reduce="amax"
    ),
    "scatter_reduce of a larger source": lambda x, i: x.scatter_reduce(
        -1, wide(i)[:, :2, :3], (x * 2).detach(), "mean"
    ),
    "scatter_reduce of whole numbers": lambda x, i: i.scatter_reduce(1, i % 4, i * 3, "mean"),
    "scatter_reduce in place": lambda x, i: (x * 1).scatter_reduce_(1, wide(i), x, "amin"),
    **{
        f"index_reduce {kind} {'with' if own else 'without'} own": (
            lambda x, i, kind=kind, own=own: steps(x).index_reduce(
                -1, FIVE, steps(x * 0.7), kind, include_self=own
            )
        )
        for kind in ("mean", "prod", "amax", "amin")
        for own in (True, False)
    },
    "take": lambda x, i: x.take(i * 3 - 7),
    "take of i32": lambda x, i: torch.take(x, (i * 3).long()),
    "put": lambda x, i: (x * 1).put(torch.tensor([3, -1, 0]), x[0, 0, :3]),
    "put added": lambda x, i: x.put(FIVE - 2, x[0, 0], accumulate=True),
    "diagonal_scatter": lambda x, i: x.diagonal_scatter(x[:, :, 0] * 3, 0, -2, -1),
    "diagonal_scatter below": lambda x, i: x.diagonal_scatter(x[:, 1:, 0] * 3, -1, 1, 2),
    "slice_scatter in steps": lambda x, i: x.slice_scatter(x[..., :2] * 3, -1, 1, 4, 2),
    "slice_scatter of samples": lambda x, i: x.slice_scatter(x[1:] * 3, 0, 1),
    "trace": lambda x, i: x[:, :, 0].T.matmul(x[:, :, 1]).trace(),
    "diagonal of samples": lambda x, i: x.matmul(x.mT).diagonal(1, -1, -2),
    "cumprod": lambda x, i: steps(x).cumprod(-1),
    "cumprod of samples": lambda x, i: x.cumprod(0),
    "logcumsumexp": lambda x, i: (x * 30).logcumsumexp(1),
    "logcumsumexp downhill": lambda x, i: (x - 200.0 * torch.arange(5)).logcumsumexp(-1),
    "cummax": lambda x, i: steps(x).cummax(-1),
    "cummin of whole numbers": lambda x, i: i.cummin(1),
    "cummin": lambda x, i: torch.cummin(steps(x), dim=0),
    **{
        f"norm {order} over {dim}": (
            lambda x, i, order=order, dim=dim: torch.linalg.vector_norm(
                steps(x), order, dim=dim, keepdim=True
            )
        )
        for order in (0, 0.5, 1, 1.5, 2, 3, -1, float("inf"), float("-inf"))
        for dim in (-1, (0, 2), None)
    },
    **{
        f"cdist {p}": lambda x, i, p=p: torch.cdist(steps(x), steps(x.flip(1)), p)
        for p in (0, 0.5, 1, 1.5, 2, 3, float("inf"))
    },
    "pdist": lambda x, i: F.pdist(x[0], 3),
    "pdist of samples": lambda x, i: torch.pdist(steps(x[:, 0]), float("inf")),
    **{
        f"bag {mode} {padding}": (
            lambda x, i, mode=mode, padding=padding: F.embedding_bag(
                i, bag(x), mode=mode, padding_idx=padding
            )
        )
        for mode in ("sum", "mean", "max")
        for padding in (None, 2, -18)
    },
    "bag by offsets": lambda x, i: F.embedding_bag(
        i.reshape(-1), bag(x), torch.tensor([0, 3, 3, 5]), mode="mean"
    ),
    "bag by offsets with the last": lambda x, i: F.embedding_bag(
        i.reshape(-1)[:7].int(), bag(x), torch.tensor([0, 3, 3, 7]).int(), mode="max",
        include_last_offset=True, padding_idx=1,
    ),
    "bag weighed": lambda x, i: F.embedding_bag(
        i, bag(x), per_sample_weights=x[:, :, 0] * 2, mode="sum", padding_idx=3
    ),
    "bag of ties": lambda x, i: F.embedding_bag(i, steps(bag(x)), mode="max"),
    **{
        f"{name} of dim {dim}": lambda x, i, name=name, dim=dim: getattr(torch, name)(
            x, dim, keepdim=dim == 0
        )
        for name in ("median", "nanmedian")
        for dim in (0, 1, -1)
    },
    "median of all, equal ones": lambda x, i: steps(x).median() + x.nanmedian(),
    "median of whole numbers": lambda x, i: (i.median(), i.median(1).values),
    **{
        f"{name} where some are no numbers": lambda x, i, name=name: torch.nan_to_num(
            getattr(torch, name)(holes(x), 1).values, 3.0
        )
        for name in ("median", "nanmedian")
    },
    "nanmedian of all where some are no numbers": lambda x, i: holes(x).nanmedian(),
    **{f"kthvalue {k} of {dim}": lambda x, i, k=k, dim=dim: x.kthvalue(k, dim)
       for k, dim in ((1, -1), (3, 0), (4, 1))},
    **{
        f"quantile {kind}, {form}": lambda x, i, kind=kind, q=q, dim=dim: torch.quantile(
            x if dim is None else steps(x), q, dim, keepdim=dim == 1, interpolation=kind
        )
        for kind in ("linear", "lower", "higher", "midpoint", "nearest")
        for form, (q, dim) in {
            "of all": (0.3, None),
            "of a dim": (0.5, -1),
            "several of a dim": (torch.tensor([0.0, 0.4, 0.85, 1.0]), 1),
            "several of all": (torch.tensor([0.1, 0.6]), None),
        }.items()
    },
    "nanquantile": lambda x, i: torch.nanquantile(holes(x), torch.tensor([0.2, 0.9]), 1),
    "quantile where some are no numbers": lambda x, i: torch.nan_to_num(holes(x).quantile(0.4, 1)),
    "quantile by a trained number": lambda x, i: x.quantile(x[0, 0, 0].sigmoid(), dim=2),
    "fill_diagonal_": lambda x, i: (x[:, :, 0] * 1).fill_diagonal_(2.0),
    "fill_diagonal_ of a tall matrix": lambda x, i: (
        (torch.zeros(7, 2) + x[0, 0, 0]).fill_diagonal_(1, True)
    ),
    "fill_diagonal_ of a cube": lambda x, i: (torch.zeros(3, 3, 3) + x[0, 0, :3]).fill_diagonal_(
        0.5
    ),
    "angle": lambda x, i: x.angle() + i.angle().unsqueeze(-1),
    "chain_matmul": lambda x, i: torch.linalg.multi_dot([x[0], x[1].T, x[2]]),
    **{
        f"adaptive_max_pool1d to {n}": lambda x, i, n=n: F.adaptive_max_pool1d(
            steps(x), n, return_indices=True
        )
        for n in (1, 2, 3, 5)
    },
    **{
        f"adaptive_max_pool2d to {n}": lambda x, i, n=n: F.adaptive_max_pool2d(steps(x), n)
        for n in (1, (2, 5), (3, 2))
    },
    "adaptive_max_pool3d": lambda x, i: F.adaptive_max_pool3d(steps(x)[:2, None], (2, 3, 2)),
    "_safe_softmax": lambda x, i: torch.ops.aten._safe_softmax(hidden(x), -1),
    "_safe_softmax of samples": lambda x, i: torch.ops.aten._safe_softmax(hidden(x), 1),
    **{
        f"grid_sample 3d {mode}, {padding}, {aligned}": (
            lambda x, i, mode=mode, padding=padding, aligned=aligned: F.grid_sample(
                x[:2, :2, None].reshape(1, 2, 2, 1, 5) * 1.0,
                (x[:, :, :3] * 1.3).reshape(1, -1, 2, 2, 3),
                mode, padding, aligned,
            )
        )
        for mode in ("bilinear", "nearest")
        for padding in ("zeros", "border", "reflection")
        for aligned in (True, False)
    },
    "roll": lambda x, i: x.roll((7, -3), (0, -1)) + x.roll(1),
    "roll by a size": lambda x, i: x.roll(x.shape[0] - 5, 0),
    "fftshift": lambda x, i: torch.fft.ifftshift(torch.fft.fftshift(x, (0, 1)), -1),
    "max_pool2d with indices": lambda x, i: F.max_pool2d(x, 2, return_indices=True),
    "max_pool2d with indices, ends cut off": lambda x, i: F.max_pool2d(
        x, 2, 2, 0, ceil_mode=True, return_indices=True
    ),
    "max_pool1d with indices": lambda x, i: F.max_pool1d(x, 3, 2, 1, return_indices=True),
    "as_strided, windows that overlap": lambda x, i: (x * 1).as_strided(
        (x.shape[0], 3, 2, 5), (20, 5, 5, 1)
    ),
    "as_strided of turned memory": lambda x, i: (x * 1).transpose(0, 1).as_strided(
        (x.shape[0] - 1, 7), (20, 2), 3
    ),
    "as_strided of turned numbers": lambda x, i: (x[:2] * 1).mT.as_strided((2, 7), (20, 2), 3),
    "native_layer_norm": lambda x, i: torch.native_layer_norm(x, [5], x[0, 0], None, 1e-3),
}  # fmt: skip


class Net(nn.Module):
    """The sum of a form's numbers, each with a weight of its own."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form, self.w = form, nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        made = self.form(x * self.w, i)
        loss = (self.w * 0.5).sum()
        for y in made if isinstance(made, (list, tuple)) else [made]:
            flat = y.to(x.dtype).reshape(-1)
            loss = loss + (flat * torch.cos(torch.arange(flat.numel()) * 0.7 + 0.3)).sum()
        return loss


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FORMS)
def test_a_form_is_eagers_at_two_batch_sizes(name: str) -> None:
    model, random = Net(FORMS[name]), torch.Generator().manual_seed(1)
    made = None
    for size in (3, 4):
        x = torch.randn(size, 4, 5, generator=random)
        data = {"x": x, "i": torch.randint(0, 5, (size, 4), generator=random)}
        if made is None or made.captured.dims(list(data.values())) is None:
            made = tiny.compiled(model, data)  # a form that needs its sizes as numbers
            graph = made.differentiated(tiny.trained(made))
        names = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
        have = tiny.plain(tiny.execute(made, graph, data, names))
        want = tiny.eager(model, data, torch.float32)
        assert set(have) == set(want)
        for key, y in want.items():
            torch.testing.assert_close(have[key], y, rtol=2e-5, atol=2e-5, msg=key)
