"""Programs that choose rows by a boolean mask, as people write them.

A program makes a loss of the states `h f[B,T,D]` and the batch; `Choosing` is its model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from row_programs import CLASSES, LENGTH, SIZE, WIDTH, WORDS, Batch
from torch import Tensor, nn

Program = Callable[["Choosing", Tensor, Batch], Tensor]


class Choosing(nn.Module):
    """A token-wise layer, and a program on its states."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.program = program
        self.words, self.inner = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.number = nn.Linear(WIDTH, 1)

    def forward(self, **d: Tensor) -> Tensor:
        h = self.words(d["ids"])
        return self.program(self, h + torch.tanh(self.inner(h)), d)


def _real(d: Batch) -> Tensor:
    return d["mask"].bool()


def _labelled(d: Batch) -> Tensor:
    return d["labels"] != -100


def _unpadded(p: Choosing, h: Tensor, d: Batch) -> Tensor:
    """The loss of a model that unpads its rows and pads them again, as ModernBERT does."""
    places = torch.nonzero(d["mask"].flatten(), as_tuple=False).flatten()
    rows = p.norm(p.inner(h.flatten(0, 1)[places]))
    whole = h.new_zeros(h.shape[0] * h.shape[1], h.shape[2])
    whole[places] = rows
    logits = p.head(whole.view(h.shape))
    return F.cross_entropy(logits.flatten(0, 1), d["labels"].flatten())


def _put_back(p: Choosing, h: Tensor, d: Batch) -> Tensor:
    m, whole = _real(d), torch.zeros_like(h)
    whole[m] = torch.tanh(p.inner(h[m]))
    return (h + whole).square().mean()


def _changed_in_place(p: Choosing, h: Tensor, d: Batch) -> Tensor:
    h = h.clone()
    h[_real(d)] += 0.5
    h[_real(d)] = h[_real(d)] * 2
    return h.square().mean()


def _each_sequence(p: Choosing, h: Tensor, d: Batch) -> Tensor:
    vectors = torch.stack([h[i][_real(d)[i]].mean(0) for i in range(SIZE)])
    return F.cross_entropy(p.head(vectors), d["classes"])


def _twice(p: Choosing, h: Tensor, d: Batch) -> Tensor:
    rows, labels = h[_real(d)], d["labels"][_real(d)]
    kept = labels != -100
    return F.cross_entropy(p.head(rows[kept]), labels[kept])


def _own_softmax(p: Choosing, h: Tensor, d: Batch) -> Tensor:
    logits, labels = p.head(h[_labelled(d)]), d["labels"][_labelled(d)]
    chosen = logits.log_softmax(-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return -chosen.sum() / _labelled(d).sum()


def _distances(p: Choosing, h: Tensor, d: Batch) -> Tensor:
    """The square root of 0 at rows that are not chosen, where its gradient is not finite."""
    other = torch.where(_real(d).unsqueeze(-1), h.detach() + 1, h)
    return (h[_real(d)] - other[_real(d)]).square().sum(-1).sqrt().mean()


def _halves(p: Choosing, h: Tensor, d: Batch) -> Tensor:
    a, b = h[_real(d)].chunk(2, -1)
    return (a * b.sigmoid()).mean()


def _rows_and_columns(p: Choosing, h: Tensor, d: Batch) -> Tensor:
    i, j = d["mask"].nonzero(as_tuple=True)
    return F.cross_entropy(p.head(h[i, j]), d["tags"][i, j])


def _asked_for_its_class(p: Any, h: Tensor, d: Any) -> Tensor:
    y = h[_real(d)]
    right = type(y) is Tensor and isinstance(y, Tensor) and torch.is_tensor(y)
    return y.square().sum() if right else h.sum()


PROGRAMS: dict[str, Program] = {
    "asked for its class": _asked_for_its_class,
    "mean of rows": lambda p, h, d: p.number(h[_real(d)].mean(0)).square().sum(),
    "mean": lambda p, h, d: h[_real(d)].square().mean(),
    "power": lambda p, h, d: torch.pow(h[_real(d)], 2).mean(),
    "sum": lambda p, h, d: h[_real(d)].square().sum(),
    "mean of features, then all": lambda p, h, d: h[_real(d)].mean(-1).square().mean(),
    "mean, axis": lambda p, h, d: torch.mean(h[_real(d)], axis=-1).square().sum(),  # pyright: ignore
    "mean, dim kept": lambda p, h, d: h[_real(d)].mean(0, keepdim=True).square().sum(),
    "over the number of rows": lambda p, h, d: (
        h[_real(d)].square().sum() / h[_real(d)].shape[0]
    ),
    "over their size": lambda p, h, d: h[_real(d)].sum() / h[_real(d)].size(0),
    "over their numbers": lambda p, h, d: h[_real(d)].sum() / h[_real(d)].numel(),
    "max": lambda p, h, d: h[_real(d)].max(),
    "amax of rows": lambda p, h, d: h[_real(d)].amax(0).square().sum(),
    "amin, both dims": lambda p, h, d: h[_real(d)].amin((0, 1)),
    "largest feature": lambda p, h, d: h[_real(d)].max(-1).values.sum(),
    "logsumexp": lambda p, h, d: h[_real(d)].logsumexp(0).sum(),
    "norms": lambda p, h, d: h[_real(d)].norm(dim=-1).mean(),
    "head": lambda p, h, d: F.cross_entropy(p.head(h[_labelled(d)]), d["labels"][_labelled(d)]),
    "head, the mask once": lambda p, h, d: (
        lambda m: F.cross_entropy(p.head(h[m]), d["labels"][m])
    )(d["labels"].ne(-100)),
    "logits": lambda p, h, d: F.cross_entropy(
        p.head(h)[_labelled(d)], d["labels"][_labelled(d)]
    ),
    "flat": lambda p, h, d: F.cross_entropy(
        p.head(h.view(-1, WIDTH)[d["labels"].view(-1) != -100]),
        d["labels"].view(-1)[d["labels"].view(-1) != -100],
    ),
    "smoothed": lambda p, h, d: F.cross_entropy(
        p.head(h[_labelled(d)]), d["labels"][_labelled(d)], label_smoothing=0.2
    ),
    "weighed": lambda p, h, d: F.cross_entropy(
        p.head(h[_labelled(d)]), d["labels"][_labelled(d)], torch.tensor([0.5, 2.0, 1.0, 0.0]).to(h)
    ),
    "labels ignored among them": lambda p, h, d: F.cross_entropy(
        p.head(h[_real(d)]), d["labels"][_real(d)]
    ),
    "summed": lambda p, h, d: F.cross_entropy(
        p.head(h[_labelled(d)]), d["labels"][_labelled(d)], reduction="sum"
    ),
    "losses of each": lambda p, h, d: F.cross_entropy(
        p.head(h[_labelled(d)]), d["labels"][_labelled(d)], reduction="none"
    ).mean(),
    "chosen losses": lambda p, h, d: F.cross_entropy(
        p.head(h).flatten(0, 1), d["labels"].flatten(), reduction="none"
    )[_labelled(d).flatten()].mean(),
    "kl": lambda p, h, d: F.kl_div(
        p.head(h[_real(d)]).log_softmax(-1), h.detach()[..., :CLASSES].softmax(-1)[_real(d)],
        reduction="batchmean",
    ),
    "own softmax": _own_softmax,
    "squares": lambda p, h, d: F.mse_loss(
        p.number(h)[_real(d)].squeeze(-1), d["weights"][_real(d)]
    ),
    "absolute": lambda p, h, d: F.l1_loss(
        p.number(h).squeeze(-1)[_real(d)], d["weights"][_real(d)], reduction="sum"
    ),
    "smooth": lambda p, h, d: F.smooth_l1_loss(
        p.number(h[_real(d)]).view(-1), d["weights"][_real(d)]
    ),
    "two classes": lambda p, h, d: F.binary_cross_entropy_with_logits(
        p.number(h[_real(d)]).flatten(), (d["types"][_real(d)] == 1).to(h.dtype)
    ),
    "classes of one-hot": lambda p, h, d: F.binary_cross_entropy_with_logits(
        p.head(h[_real(d)]), F.one_hot(d["tags"][_real(d)], CLASSES).to(h.dtype),
    ),
    "cosine": lambda p, h, d: (
        1 - F.cosine_similarity(h[_real(d)], p.inner(h)[_real(d)], dim=-1)
    ).mean(),
    "cosine loss": lambda p, h, d: F.cosine_embedding_loss(
        h[_real(d)], p.inner(h[_real(d)]), d["types"][_real(d)] * 2 - 1
    ),
    "margin": lambda p, h, d: F.triplet_margin_loss(
        h[_real(d)], p.inner(h[_real(d)]), h[_real(d)].flip(-1)
    ),
    "distances": _distances,
    "roots": lambda p, h, d: (
        torch.where(_real(d).unsqueeze(-1), h.abs() + 1, 0 * h)[_real(d)].sqrt().log().mean()
    ),
    "layers of rows": lambda p, h, d: p.norm(F.gelu(p.inner(h[_real(d)]))).square().mean(),
    "lookup": lambda p, h, d: p.words(d["ids"][_real(d)]).square().mean(),
    "dropped, with no chance": lambda p, h, d: F.dropout(h[_real(d)], 0.0).square().sum(),
    "heads": lambda p, h, d: (
        h[_real(d)].view(-1, 2, WIDTH // 2).transpose(1, 2).softmax(-1)[:, 0].square().sum()
    ),
    "the view of as many rows": lambda p, h, d: (
        h[_real(d)].reshape(h[_real(d)].size(0), -1).square().sum()
    ),
    "joined features": lambda p, h, d: torch.cat(
        [h[_real(d)], p.inner(h)[_real(d)]], -1
    ).square().mean(),
    "stacked": lambda p, h, d: torch.stack(
        [h[_real(d)], p.inner(h[_real(d)])], 1
    ).amax(1).sum(),
    "halves": _halves,
    "features": lambda p, h, d: (
        h[_real(d)][:, 1:3].sum() + h[_real(d)][..., 0].square().mean() + h[_real(d)][:, -1].sum()
    ),
    "mask and a feature": lambda p, h, d: h[_real(d), 2].square().mean(),
    "masked_select": lambda p, h, d: h.masked_select(_real(d).unsqueeze(-1)).square().mean(),
    "masked_select of numbers": lambda p, h, d: torch.masked_select(
        p.number(h).squeeze(-1), _real(d)
    ).square().mean(),
    "masked_select, viewed": lambda p, h, d: F.cross_entropy(
        p.head(torch.masked_select(h, _labelled(d).unsqueeze(-1)).view(-1, WIDTH)),
        torch.masked_select(d["labels"], _labelled(d)),
    ),
    "nonzero": lambda p, h, d: h.flatten(0, 1)[
        d["mask"].flatten().nonzero().squeeze(-1)
    ].square().mean(),
    "index_select": lambda p, h, d: h.flatten(0, 1).index_select(
        0, d["mask"].flatten().nonzero().view(-1)
    ).square().mean(),
    "where": lambda p, h, d: h[torch.where(_real(d))].square().mean(),
    "rows and columns": _rows_and_columns,
    "put back": _put_back,
    "unpadded": _unpadded,
    "changed in place": _changed_in_place,
    "each sequence": _each_sequence,
    "twice": _twice,
    "two masks, apart": lambda p, h, d: h[_real(d)].mean() + h[_labelled(d)].square().sum(),
    "right": lambda p, h, d: (
        ((p.head(h[_labelled(d)]).argmax(-1) == d["labels"][_labelled(d)]).float().mean() + 1)
        * h[_labelled(d)].mean()
    ),
    "some": lambda p, h, d: torch.where(
        (d["tags"][_real(d)] > 1).any(), h[_real(d)].sum(), h.mean()
    ),
    "all": lambda p, h, d: torch.where(
        (d["tags"][_real(d)] >= 0).all(), h[_real(d)].sum(), h.mean()
    ),
}  # fmt: skip

# programs that mix rows, or ask for their number
REFUSED: dict[str, tuple[Program, str]] = {
    "two masks": (
        lambda p, h, d: F.cross_entropy(p.head(h[_real(d)]), d["labels"][_labelled(d)]),
        "cross_entropy combines rows chosen by two boolean masks",
    ),
    "a mask changed between": (
        lambda p, h, d: _changed(p, h, d), "rows chosen by two boolean masks"
    ),
    "among themselves": (
        lambda p, h, d: (h[_real(d)] @ h[_real(d)].T).mean(), "T of rows that a boolean mask",
    ),
    "products of rows": (
        lambda p, h, d: (torch.ones(1, 5) @ h[_real(d)]).mean(), "matmul, a product that mixes",
    ),
    "softmax of rows": (lambda p, h, d: h[_real(d)].softmax(0).square().sum(), "softmax along"),
    "one row": (lambda p, h, d: h[_real(d)][0].sum(), "a look at single ones"),
    "some rows": (lambda p, h, d: h[_real(d)][:2].sum(), "a look at single ones"),
    "sorted": (lambda p, h, d: h[_real(d)].sort(0).values[:, 0].sum(), "sort along"),
    "variance": (lambda p, h, d: h[_real(d)].var(0).sum(), "var over rows"),
    "joined rows": (lambda p, h, d: torch.cat([h[_real(d)], h[_real(d)]]).sum(), "cat along"),
    "stacked before": (
        lambda p, h, d: torch.stack([h[_real(d)], h[_real(d)]], -3).sum(), "stack along",
    ),
    "repeated": (
        lambda p, h, d: h[_real(d)].repeat_interleave(2, 0).sum(), "repeat_interleave of rows",
    ),
    "len": (lambda p, h, d: h.sum() / len(h[_real(d)]), r"len\(\) of rows"),
    "a loop": (
        lambda p, h, d: torch.stack([r.sum() for r in h[_real(d)]]).sum(), "a loop of rows"
    ),
    "with every row": (lambda p, h, d: (h[_real(d)] + h.flatten(0, 1)).sum(), "add with a tensor"),
    "broadcast": (
        lambda p, h, d: F.mse_loss(p.number(h[_real(d)]), d["weights"][_real(d)]),
        "mse_loss, which broadcasts",
    ),
    "other rows": (lambda p, h, d: h[_real(d)].view(-1, 2).sum(), "view to other rows"),
    "returned": (lambda p, h, d: h[_real(d)].sum(-1), "the model returns output, rows"),
    "packed": (
        lambda p, h, d: nn.utils.rnn.pack_padded_sequence(
            h, d["last"] + 1, batch_first=True, enforce_sorted=False
        ).data.sum(),
        "a packed sequence .* has a number of rows that depends on the data; fix: give the layer "
        "the padded",
    ),
}  # fmt: skip


def _changed(p: Choosing, h: Tensor, d: Batch) -> Tensor:
    m = _real(d)
    rows = h[m]
    m &= d["types"] == 0
    return (rows * h[m]).sum()


def batch(kind: str) -> Batch:
    """kind: ragged, holes, all rows, or one."""
    g = torch.Generator().manual_seed(3)
    mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [1], [3]])).long()
    if kind == "holes":
        mask = torch.tensor([[0, 1, 0, 1, 1], [0, 0, 0, 0, 1], [1, 0, 1, 0, 0]])
    if kind == "all":
        mask = torch.ones_like(mask)
    tags = torch.randint(0, CLASSES, (SIZE, LENGTH), generator=g)
    labelled = (torch.rand((SIZE, LENGTH), generator=g) < 0.5) & (mask != 0)
    if kind == "one":
        labelled = torch.zeros_like(labelled)
    labelled[2, 2] = True
    return {
        "ids": torch.randint(0, WORDS, (SIZE, LENGTH), generator=g), "mask": mask, "tags": tags,
        "labels": tags.masked_fill(~labelled, -100),
        "types": torch.randint(0, 2, (SIZE, LENGTH), generator=g),
        "weights": torch.rand(SIZE, LENGTH, generator=g),
        "classes": torch.randint(0, CLASSES, (SIZE,), generator=g),
        "last": mask.cumsum(1).argmax(1),
    }  # fmt: skip
