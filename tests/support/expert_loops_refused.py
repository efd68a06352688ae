"""Loops over experts whose turns without rows do something, or are not known to do nothing; and
forms that no model has of those which have been measured (docs/notes/0035-loops-or-regions.md)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from expert_loops import (
    EXPERTS,
    WIDTH,
    Experts,
    Loop,
    at,
    back,
    by_expert,
    counts_of,
    ends_of,
    hits,
    in_order,
    mask_of,
)
from torch import Tensor


def counted(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask, turns = torch.zeros_like(x), mask_of(chosen), 0
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        y.index_add_(0, token, x[token])
        turns += 1
    return y / turns


def seen_by_others(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """Each turn reads what those before it have added."""
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        y.index_add_(0, token, F.linear(x[token] + y[token], p.up[e[0]]) @ p.up[e[0]])
    return y


def put_aside(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask, all_ = torch.zeros_like(x), mask_of(chosen), []
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        all_.append(x[token].sum())
    return y + torch.stack(all_).mean()


def faded(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.ones_like(x), mask_of(chosen)
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        y = y * 0.5
        y.index_add_(0, token, x[token])
    return y


def changed(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.ones_like(x), mask_of(chosen)
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        y.mul_(0.5)
        y.index_add_(0, token, x[token])
    return y


def hidden(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.ones_like(x), mask_of(chosen)
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        rows = x[token] + y.mul_(0.5).mean()
        y.index_add_(0, token, rows)
    return y


def numbered(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for i, e in enumerate(hits(mask)):
        _, token = torch.where(mask[e[0]])
        y.index_add_(0, token, x[token] * i)
    return y


def read_after(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask, rows = torch.zeros_like(x), mask_of(chosen), x
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        rows = x[token]
        y.index_add_(0, token, rows)
    return y + rows.mean()


def before(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop in which each turn reads the rows of the turn before."""
    y, mask, last = torch.zeros_like(x), mask_of(chosen), x.mean()
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        y.index_add_(0, token, x[token] * last)
        last = x[token].mean()
    return y


def fading(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop in which each turn counts for half of the one before."""
    y, mask, share = torch.zeros_like(x), mask_of(chosen), 1.0
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        y.index_add_(0, token, x[token] * share)
        share = share / 2
    return y


def noted(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop whose result depends on whether there was a turn."""
    y, mask, share = torch.zeros_like(x), mask_of(chosen), 1.0
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        y.index_add_(0, token, x[token])
        share = 2.0
    return y * share


def several(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop whose mask may give a token to several experts at one place."""
    mask = (mask_of(chosen) + mask_of(chosen.flip(-1) * 0)).clamp(max=1)
    y = torch.zeros_like(x)
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        y.index_add_(0, token, F.linear(F.linear(x[token], p.up[e[0]]), p.down[e[0]]))
    return y


def mixed(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop in which the rows of one expert depend on each other."""
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        y.index_add_(0, token, x[token] - x[token].mean(0))
    return y


def by_their_number(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        y.index_add_(0, token, x[token] / token.shape[0])
    return y


def more_than_two(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        if token.numel() > 2:
            y.index_add_(0, token, x[token])
    return y


def overwritten(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        y[token] = x[token] * p.up_bias[e[0]].sum()
    return y


def broken_off(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        y.index_add_(0, token, x[token])
        break
    return y


def asked_too_late(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        y.index_add_(0, token, x[token])
        if e[0] == 1:
            y.index_add_(0, token, x[token])
    return y


def mean_of_rows(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A mean over rows, which is NaN where there are none."""
    y, mask = x.mean(0), mask_of(chosen)
    for i in range(EXPERTS):
        _, token = torch.where(mask[i])
        if token.numel() > 0:
            y = y + x[token].mean(0)
    return y.expand_as(x)


def once_for_all(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop that takes the rows of another mask, for each expert that is hit."""
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        (token,) = torch.where(x[:, 0] > 0)
        y.index_add_(0, token, x[token])
    return y


def _halve(y: Tensor) -> Tensor:
    return y.mul_(0.5)


def by_a_helper(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.ones_like(x), mask_of(chosen)
    for e in hits(mask):
        _, token = torch.where(mask[e[0]])
        _ = _halve(y)
        y.index_add_(0, token, x[token])
    return y


def for_want_of_rows(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop in which an expert without tokens gets the first one."""
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for i in range(EXPERTS):
        _, token = torch.where(mask[i])
        if token.numel() > 0:
            y.index_add_(0, token, p.list[i](x[token]))
        else:
            y.index_add_(0, torch.tensor([0]), p.list[i](x[:1]))
    return y


def if_others(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop that asks whether another mask has rows."""
    y, mask = torch.zeros_like(x), mask_of(chosen)
    (high,) = torch.where(scale[:, 0] > 0.9)
    for i in range(EXPERTS):
        _, token = torch.where(mask[i])
        if high.numel() > 0:
            y.index_add_(0, token, x[token])
    return y


def two_choices(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for i in range(EXPERTS):
        _, token = torch.where(mask[i])
        (high,) = torch.where(x[:, 0] > 0)
        if token.numel() > 0:
            y.index_add_(0, high, x[high])
    return y


def of_other_rows(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for i in range(EXPERTS):
        _, token = torch.where(mask[i])
        if token.numel() > 0:
            token = torch.arange(len(x))
            y.index_add_(0, token, x)
    return y


def in_another_order(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    _, sizes, token = by_expert(x, chosen)
    parts = x[token].split(sizes, dim=0)
    h = torch.cat([F.linear(part, p.up[0]) for part in reversed(parts)], dim=0)
    return x + h.mean()


def some_pieces(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    _, sizes, token = by_expert(x, chosen)
    parts = x[token].split(sizes, dim=0)
    return x + torch.cat([part * 2 for part in parts[1:]], dim=0).mean()


def sums_of_pieces(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    _, sizes, token = by_expert(x, chosen)
    parts = x[token].split(sizes, dim=0)
    return x + torch.cat([part - part.mean(0) for part in parts], dim=0).square().mean()


def by_count(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    _, sizes, _ = by_expert(x, chosen)
    return x * (sizes[0] + 1)


def unlike_functions(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    _, sizes, token = by_expert(x, chosen)
    parts = x[token].split(sizes, dim=0)
    h = [torch.tanh(part) if i else torch.relu(part) for i, part in enumerate(parts)]
    return x + torch.cat(h, dim=0).mean()


def asks_for_others(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    _, rows, counts = in_order(x, chosen)
    start, of = 0, counts.tolist()
    parts = []
    for i, n in enumerate(reversed(of)):
        end = start + of[i]
        if n == 0:
            continue
        parts.append(rows[start:end] * 2)
        start = end
    return x + torch.cat(parts).mean()


def asks_for_the_first(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    _, rows, counts = in_order(x, chosen)
    start = 0
    parts = []
    for n in counts:
        end = start + n
        if counts[0] == 0:
            continue
        parts.append(rows[start:end] * 2)
        start = end
    return x + torch.cat(parts).mean()


def rows_of_none(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    _, rows, counts = in_order(x, chosen)
    start = 0
    parts = []
    for n in counts:
        if n == 0:
            parts.append(torch.ones(1, WIDTH))
            continue
        end = start + n
        parts.append(rows[start:end] * 2)
        start = end
    return x + torch.cat(parts).mean()


def turns_counted(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    _, rows, counts = in_order(x, chosen)
    start, turns = 0, 0
    parts = []
    for n in counts:
        if n == 0:
            continue
        end = start + n
        parts.append(rows[start:end] * 2)
        start, turns = end, turns + 1
    return x + torch.cat(parts).mean() / turns


def list_counted(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    _, rows, counts = in_order(x, chosen)
    start = 0
    parts = []
    for n in counts:
        if n == 0:
            continue
        end = start + n
        parts.append(rows[start:end] * 2)
        start = end
    return x + torch.cat(parts).mean() / len(parts)


def sums_listed(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    _, rows, counts = in_order(x, chosen)
    start = 0
    parts = []
    for n in counts:
        if n == 0:
            continue
        end = start + n
        parts.append(rows[start:end].mean(0, keepdim=True))
        start = end
    return x + torch.cat(parts).mean(0)


def others_listed(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    counts = counts_of(chosen)
    parts = []
    for i, n in enumerate(counts):
        if n == 0:
            continue
        parts.append(p.up[i])
    return x + torch.cat(parts).mean()


def few_rows(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    _, rows, counts = in_order(x, chosen)
    start = 0
    parts = []
    for n in counts:
        end = start + n
        if n <= 1:
            continue
        parts.append(rows[start:end] * 2)
        start = end
    return x + torch.cat(parts).mean()


def overlapping(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    _, rows, counts = in_order(x, chosen)
    ends = counts.cumsum(0)
    return x + torch.cat([rows[: ends[i]] for i in range(EXPERTS)]).mean()


def the_last_left_out(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    _, rows, counts = in_order(x, chosen)
    ends = ends_of(counts)
    return x + torch.cat([rows[ends[i] : ends[i + 1]] for i in range(EXPERTS - 1)]).mean()


def written_in_part(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    _, rows, counts = in_order(x, chosen)
    ends, y = ends_of(counts), torch.zeros_like(rows)
    for i in range(EXPERTS - 1):
        y[ends[i] : ends[i + 1]] = rows[ends[i] : ends[i + 1]] * 2
    return x + y.mean()


def written_elsewhere(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    _, rows, counts = in_order(x, chosen)
    ends, y = ends_of(counts), torch.zeros_like(rows)
    for i in range(EXPERTS):
        k = EXPERTS - 1 - i
        y[ends[i] : ends[i + 1]] = rows[ends[k] : ends[k + 1]] * 2
    return x + y.mean()


def a_view_read_between(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    _, rows, counts = in_order(x, chosen)
    ends, y = ends_of(counts), torch.zeros_like(rows)
    z, seen = y[:, :2], x.new_zeros(())
    for i in range(EXPERTS):
        y[ends[i] : ends[i + 1]] = rows[ends[i] : ends[i + 1]] * 2
        seen = seen + z.sum()
    return x + y.mean() + seen


def unhit_masks(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    mask = F.one_hot(chosen[:, 0], EXPERTS).bool()
    y, numbers = torch.zeros_like(x), mask.sum(0).nonzero(as_tuple=True)[0].tolist()
    return y / len(numbers)


def places_by_number(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    mask, order = F.one_hot(chosen[:, 0], EXPERTS).bool(), torch.arange(EXPERTS)
    y = torch.zeros_like(x)
    for e in mask.sum(0).nonzero(as_tuple=True)[0].tolist():
        if e == 1:
            y[order[e]] = 1.0
    return y


def in_part(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop that calls the expert's layers one by one, not the expert."""
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for e in hits(mask):
        expert = at(p.list, e)
        place, token = torch.where(mask[e].squeeze(0))
        h = F.relu(expert.up(x[token])) @ expert.down.weight.t()
        y.index_add_(0, token, h * scale[token, place, None])
    return y


def turned(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), F.one_hot(chosen[:, 1], EXPERTS).T
    for e in (mask.sum(-1) > 0).nonzero():
        (token,) = torch.where(mask[e[0]])
        y.index_add_(0, token, F.linear(x[token], p.up[e[0]]).matmul(p.down[e[0]].mT))
    return y


def cut_by_a_list(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """Rows cut by counts that are numbers in Python, not tensors."""
    order, rows, counts = in_order(x, chosen)
    start, parts = 0, []
    for n, up, down in zip(counts.tolist(), p.up, p.down, strict=True):
        parts.append(F.linear(F.silu(F.linear(rows[start : start + n], up)), down))
        start = start + n
    return back(chosen, scale, order, torch.cat(parts))


def written_where_asked(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A write in place within a loop that leaves turns without rows out."""
    order, rows, counts = in_order(x, chosen)
    ends, y = ends_of(counts), torch.zeros_like(rows)
    for i in range(EXPERTS):
        if counts[i] == 0:
            continue
        y[ends[i] : ends[i + 1]] = rows[ends[i] : ends[i + 1]] * 2
    return back(chosen, scale, order, y)


def added_in_turns(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """Rows added by an index, in a loop that asks whether there are any."""
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for i in range(EXPERTS):
        _, token = torch.where(mask[i])
        if token.numel() > 0:
            y[token] += x[token]
    return y


REFUSED: dict[str, Loop] = {
    f.__name__: f
    for f in (
        counted, seen_by_others, put_aside, faded, changed, hidden, numbered, read_after, before,
        several, mixed,
        by_their_number, more_than_two, overwritten, broken_off, asked_too_late, mean_of_rows,
        once_for_all, by_a_helper, for_want_of_rows, if_others, two_choices, of_other_rows, fading,
        noted, in_another_order, some_pieces, sums_of_pieces, by_count, unlike_functions,
        asks_for_others, asks_for_the_first, rows_of_none, turns_counted, list_counted, sums_listed,
        others_listed, few_rows, overlapping, the_last_left_out, written_in_part, written_elsewhere,
        a_view_read_between, unhit_masks, places_by_number, in_part, turned, cut_by_a_list,
        written_where_asked, added_in_turns,
    )
}  # fmt: skip
