"""Loops over the experts of a mixture, as people write them; a router chooses two of four.

A loop sends the tokens `x f[N,D]` to the experts `chosen i64[N,K]`, with weights `scale f[N,K]`;
`Experts` is its model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, INNER, EXPERTS, TOP, CLASSES = 6, 5, 4, 2, 3
Loop = Callable[["Experts", Tensor, Tensor, Tensor], Tensor]


class Expert(nn.Module):
    def __init__(self, bias: bool = True, act: Any = None, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.up, self.down = nn.Linear(WIDTH, INNER, bias), nn.Linear(INNER, WIDTH, bias)
        self.act = act or nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x))) * self.scale


class Experts(nn.Module):
    def __init__(self, loop: Loop) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.loop = loop
        self.router, self.head = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, CLASSES)
        self.up = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 2)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 2)
        self.up_bias = nn.Parameter(torch.randn(EXPERTS, INNER))
        self.down_bias = nn.Parameter(torch.randn(EXPERTS, WIDTH))
        self.list = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.tied = nn.ModuleList([self.list[0], self.list[1], self.list[0], self.list[1]])
        self.named = nn.ModuleDict({f"expert_{i}": Expert(False) for i in range(EXPERTS)})
        acts = (nn.SiLU(), nn.Tanh(), nn.ReLU(), nn.GELU())
        self.unlike = nn.ModuleList(Expert(act=act) for act in acts)
        self.idle = nn.ModuleList([*(Expert() for _ in range(EXPERTS - 1)), nn.Identity()])
        self.scaled = nn.ModuleList(Expert(scale=1.0 + i) for i in range(EXPERTS))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        weights, chosen = F.softmax(self.router(x.flatten(0, 1)), -1).topk(TOP, -1)
        y = x.flatten(0, 1) + self.loop(self, x.flatten(0, 1), chosen, weights)
        return F.cross_entropy(self.head(y), labels.flatten())


def at(modules: nn.ModuleList, number: Any) -> Any:
    """An expert by a tensor as index, as people write it though the declared type is int."""
    return modules[number]


def hits(mask: Tensor) -> Tensor:
    return torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()


def mask_of(chosen: Tensor, classes: int = EXPERTS) -> Tensor:
    with torch.no_grad():
        return F.one_hot(chosen, num_classes=classes).permute(2, 1, 0)


def tables(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop over weights of all experts in one tensor; a number beyond the last means no
    expert."""
    y, mask = torch.zeros_like(x), mask_of(chosen, EXPERTS + 1)
    for e in hits(mask):
        e = e[0]
        if e == EXPERTS:
            continue
        place, token = torch.where(mask[e])
        h = F.silu(F.linear(x[token], p.up[e]))
        h = F.linear(h, p.down[e]) * scale[token, place, None]
        y.index_add_(0, token, h.to(y.dtype))
    return y


def one_more(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop whose mask has room for an expert that gets no tokens, as in Dbrx."""
    y, mask = torch.zeros_like(x), mask_of(chosen, EXPERTS + 1)
    for e in hits(mask):
        place, token = torch.where(mask[e[0]])
        h = F.linear(F.linear(x[token], p.up[e[0]], p.up_bias[e[0]]), p.down[e[0]])
        y.index_add_(0, token, (h + p.down_bias[e[0]]) * scale[token, place, None])
    return y


def some_nowhere(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop in which some tokens go to no expert."""
    return tables(p, x, chosen.masked_fill(x[:, :1] > 0.5, EXPERTS), scale)


def with_biases(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for e in hits(mask)[:]:
        e = e[0]
        with torch.no_grad():
            place, token = torch.where(mask[e])
        h = x[token].to(x.dtype) @ p.up[e].to(x.dtype).t() + p.up_bias[e].clone()
        h = (h[..., ::2].clamp(max=2.0).tanh() if INNER > 9 else h.tanh()) @ p.down[e].T
        y.index_add_(0, token, (h + p.down_bias[e]) * scale[token, place, None])
    return y


def by_the_number(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop that looks weights up by token and expert."""
    y, mask = torch.zeros_like(x), mask_of(chosen)
    dense = x.new_zeros(x.shape[0], EXPERTS).scatter(1, chosen, scale)
    for e in hits(mask)[:]:
        e = e[0]
        _, token = torch.where(mask[e])
        h = torch.matmul(F.gelu(F.linear(x[token], p.up[e], p.up_bias[e])), p.down[e].t())
        y.index_add_(0, token, h * dense[token, e, None])
    return y


def some_leave_rows_alone(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop that reads expert numbers into Python; the last two experts do nothing."""
    y, mask = torch.zeros_like(x), mask_of(chosen)
    hit = torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero(as_tuple=False)
    for tensor in hit:
        e = int(tensor.item())
        place, token = torch.where(mask[e].squeeze(0))
        if token.numel() == 0:
            continue
        rows = x[token]
        if e < 2:
            rows = F.linear(F.silu(F.linear(rows, p.up[e])), p.down[e])
        rows = rows * scale[token, place, None]
        y.index_add_(0, token, rows)
    return y


def some_by_comparison(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for e in hits(mask)[:, 0]:
        place, token = torch.where(mask[e])
        if e >= 3:
            h = x[token] * 2
        elif e == 1:
            h = -x[token]
        else:
            h = F.linear(F.silu(F.linear(x[token], p.up[e])), p.down[e])
        y.index_add_(0, token, h * scale[token, place].unsqueeze(-1))
    return y


def from_a_list(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for e in hits(mask):
        expert = at(p.list, e)
        place, token = torch.where(mask[e].squeeze(0))
        rows = x[None, token].reshape(-1, WIDTH)
        rows = expert(rows) * scale[token, place, None]
        y.index_add_(0, token, rows.to(x.dtype))
    return y


def tied_ones(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for e in hits(mask):
        place, token = torch.where(mask[e].squeeze(0))
        y.index_add_(0, token, at(p.tied, e)(x[token]) * scale[token, place, None])
    return y


def unlike_ones(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for e in hits(mask):
        place, token = torch.where(mask[e].squeeze(0))
        y.index_add_(0, token, at(p.unlike, e)(x[token]) * scale[token, place, None])
    return y


def ones_of_other_settings(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for e in hits(mask):
        place, token = torch.where(mask[e].squeeze(0))
        y.index_add_(0, token, at(p.scaled, e)(x[token]) * scale[token, place, None])
    return y


def with_room(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop in which each expert takes its first tokens and drops the others, as in Switch
    Transformers."""
    mask = F.one_hot(chosen[:, 0], num_classes=EXPERTS)
    mask = mask * (mask.cumsum(0) <= 2)
    y, mask = torch.zeros_like(x), mask.view(-1, 1, EXPERTS).permute(2, 1, 0)
    for e in hits(mask):
        place, token = torch.where(mask[e].squeeze(0))
        rows = x[None, token].reshape(-1, WIDTH)
        rows = p.named[f"expert_{e[0]}"](rows) * scale[token, place, None]
        y.index_add_(0, token, rows.to(x.dtype))
    return y


def one_way_of_two(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop in one branch of two that use the same names, as in GPT-OSS; names are stored anew
    behind it."""
    y, mask, rows = torch.zeros_like(x), mask_of(chosen), None
    if p.training or x.device.type == "cpu":
        for e in hits(mask):
            place, token = torch.where(mask[e[0]])
            rows = x[token] * scale[token, place, None]
            y.index_add_(0, token, rows)
    else:
        y = y if rows is None else rows
    rows = y * 2
    return rows + y


def unhit(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop that gives experts of few rows no turn."""
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for e in (mask.sum((-1, -2)) > 3).nonzero():
        _, token = torch.where(mask[e[0]])
        y.index_add_(0, token, F.linear(F.linear(x[token], p.up[e[0]]), p.down[e[0]]))
    return y


def numbers_that_leave_some_out(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop over modules that gives experts of few rows no turn."""
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for e in (mask.sum((-1, -2)) > 3).nonzero():
        i = int(e)
        _, token = torch.where(mask[i])
        y.index_add_(0, token, p.list[i](x[token]))
    return y


def every_expert(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop in which each expert has a turn and those without tokens do nothing, as in
    DeepSeek."""
    y, mask = torch.zeros_like(x), F.one_hot(chosen, EXPERTS).permute(2, 0, 1)
    for i in range(EXPERTS):
        expert, own = p.list[i], mask[i]
        token, place = torch.where(own)
        if token.numel() > 0:
            weights, rows = scale[token, place], x[token]
            out = expert(rows) * weights.unsqueeze(-1)
            y.index_add_(0, token, out)
    return y.type(x.dtype)


def every_expert_in_place(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop that adds to rows in place, as Mistral's own code does."""
    y = torch.zeros_like(x)
    for i, expert in enumerate(p.list):
        token, place = torch.where(chosen == i)
        y[token] += scale[token, place, None] * expert(x[token])
    return y


def if_any_rows(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for i in range(EXPERTS):
        place, token = torch.where(mask[i])
        if token.shape[0] == 0:
            continue
        y.index_add_(0, token, p.list[i](x[token]) * scale[token, place, None])
    return y


def unasked(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop like OLMoE's: experts without tokens are called too."""
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for i in range(0, EXPERTS):
        expert_layer = p.list[i]
        place, token = torch.where(mask[i])
        rows = x[None, token].reshape(-1, WIDTH)
        rows = expert_layer(rows) * scale[token, place, None]
        y.index_add_(0, token, rows.to(x.dtype))
    return y


def numbered_experts(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for i, expert in enumerate(p.list):
        place, token = torch.where(mask[i])
        if token.numel() == 0:
            continue
        y.index_add_(0, token, expert(x[token]) * scale[token, place, None])
    return y


def some_are_identities(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop like LongCat-Flash's."""
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for i in range(len(p.idle)):
        expert = p.idle[i]
        place, token = torch.where(mask[i])
        if token.numel() > 0:
            y.index_add_(0, token, expert(x[token]) * scale[token, place].unsqueeze(-1))
    return y


def tables_of_all(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    dense = x.new_zeros(x.shape[0], EXPERTS).scatter(1, chosen, scale)
    for i in range(EXPERTS):
        _, token = torch.where(mask[i])
        h = F.linear(F.silu(F.linear(x[token], p.up[i], p.up_bias[i])), p.down[i], p.down_bias[i])
        y.index_add_(0, token, h * dense[token, i, None])
    return y


def all_by_name(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """Turn by turn, since each asks for its number."""
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for i in range(EXPERTS):
        place, token = torch.where(mask[i])
        y.index_add_(0, token, p.named[f"expert_{i}"](x[token]) * scale[token, place, None])
    return y


def all_unlike(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for i, expert in enumerate(p.unlike):
        place, token = torch.where(mask[i])
        y.index_add_(0, token, expert(x[token]) * scale[token, place, None])
    return y


def matrices_in_a_list(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop like that of Dbrx in transformers 4: turn by turn."""
    y, mask = torch.zeros_like(x), mask_of(chosen)
    up = [w.squeeze(0) for w in p.up.chunk(EXPERTS, dim=0)]
    for i in range(0, EXPERTS):
        place, token = torch.where(mask[i])
        if token.shape[0] == 0:
            continue
        y.index_add_(0, token, F.linear(x[token], up[i]) @ up[i] * scale[token, place, None])
    return y


def by_a_table_of_numbers(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """Turn by turn: a number is a key."""
    y, mask, share = torch.zeros_like(x), mask_of(chosen), defaultdict(lambda: 2.0, {0: 3.0})
    for i in range(EXPERTS):
        place, token = torch.where(mask[i])
        y.index_add_(0, token, p.list[i](x[token]) * share[i] * scale[token, place, None])
    return y


def scaled_by_number(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """Turn by turn: a number is more than an index."""
    y, mask = torch.zeros_like(x), mask_of(chosen)
    for i in range(EXPERTS):
        place, token = torch.where(mask[i])
        y.index_add_(0, token, p.list[i](x[token]) * (i + 1) * scale[token, place, None])
    return y


def fewer_than_matrices(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    y, mask = torch.zeros_like(x), mask_of(chosen.clamp(max=EXPERTS - 2), EXPERTS - 1)
    for i in range(EXPERTS - 1):
        place, token = torch.nonzero(mask[i], as_tuple=True)
        h = F.linear(F.silu(F.linear(x[token], p.up[i], p.up_bias[i])), p.down[i])
        y.index_add_(0, token, h * scale[token, place, None])
    return y


def in_turns(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """Turn by turn: each expert sees what those before it have added, under another name."""
    y, mask = x.clone(), mask_of(chosen)
    z = y.view(-1, WIDTH)
    for i in range(EXPERTS):
        place, token = torch.where(mask[i])
        y.index_add_(0, token, p.list[i](z[token]) * scale[token, place, None])
    return y


def several_of_all(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """Turn by turn: the mask is not one-hot."""
    mask = (mask_of(chosen) + mask_of(chosen.flip(-1) * 0)).clamp(max=1)
    y = torch.zeros_like(x)
    for i in range(EXPERTS):
        _, token = torch.where(mask[i])
        y.index_add_(0, token, p.list[i](x[token]))
    return y


def by_expert(x: Tensor, chosen: Tensor) -> tuple[Tensor, list[int], Tensor]:
    """Rows sorted by expert, how many each expert has, and their tokens, as JetMoe computes
    them."""
    hit = x.new_zeros(x.shape[0], EXPERTS).scatter(1, chosen, 1)
    order = chosen.flatten().sort(0)[1]
    return order, hit.long().sum(0).tolist(), order.div(TOP, rounding_mode="trunc")


def cut_by_counts(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    order, sizes, token = by_expert(x, chosen)
    parts = x[token].split(sizes, dim=0)
    h = torch.cat([F.linear(parts[i], p.up[i]) for i in range(EXPERTS)], dim=0)
    parts = F.silu(h).split(sizes, dim=0)
    h = torch.cat([F.linear(parts[i], p.down[i]) for i in range(EXPERTS)], dim=0)
    return torch.zeros_like(x).index_add(0, token, h * scale.flatten()[order][:, None])


def cut_for_modules(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    order, sizes, token = by_expert(x, chosen)
    parts = torch.split(x[token], sizes)
    h = torch.cat([expert(part) * 2 for expert, part in zip(p.list, parts, strict=True)])
    return torch.zeros_like(x).index_add(0, token, h * scale.flatten()[order][:, None])


def counts_of(chosen: Tensor) -> Tensor:
    """Counts of the rows of each expert, `i64[E]`, as DeepSeek V2 computes them."""
    counts = chosen.new_zeros((chosen.shape[0], EXPERTS))
    counts.scatter_(1, chosen, 1)
    return counts.sum(dim=0)


def in_order(x: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The order of the experts, the rows in it, and how many each expert has."""
    order = chosen.view(-1).argsort()
    return order, x[order // TOP], counts_of(chosen)


def ends_of(counts: Tensor) -> Tensor:
    """Offsets where each expert's rows begin, and where the last one's end, `i64[E+1]`, as in
    Aria."""
    return torch.cat((torch.zeros(1, dtype=torch.long), torch.cumsum(counts, dim=0)))


def back(chosen: Tensor, scale: Tensor, order: Tensor, h: Tensor) -> Tensor:
    """The sum for each token over its rows, which lie sorted by expert."""
    new = torch.empty_like(h)
    new[order] = h
    return new.view(*chosen.shape, -1).mul_(scale.unsqueeze(-1)).sum(1)


def cut_by_sums(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    order, rows, counts = in_order(x, chosen)
    outputs = []
    start_idx = 0
    for i, num_tokens in enumerate(counts):
        if num_tokens == 0:
            continue
        end_idx = start_idx + num_tokens
        expert, tokens = p.list[i], rows[start_idx:end_idx]
        outputs.append(expert(tokens) * torch.sigmoid(expert(tokens)) + tokens)
        start_idx = end_idx
    outs = torch.cat(outputs, dim=0) if outputs else rows.new_empty(0)
    return back(chosen, scale, order, outs)


def cut_by_running_sums(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop that writes each expert's piece into a tensor of zeros, as in Aria."""
    order, rows, counts = in_order(x, chosen)
    ends = ends_of(counts)
    h = torch.zeros(rows.shape[0], INNER, dtype=rows.dtype)
    for i in range(EXPERTS):
        start = ends[i]
        end = ends[i + 1]
        h[start:end] = torch.matmul(rows[start:end], p.down[i])
    y = torch.zeros(rows.shape[0], WIDTH)
    for i in range(EXPERTS):
        y[ends[i] : ends[i + 1]] = F.linear(F.silu(h[ends[i] : ends[i + 1]]), p.down[i])
    return back(chosen, scale, order, y)


def cut_in_part(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop that leaves rows beyond the counts as they are."""
    rows = x[chosen.view(-1).argsort(stable=True) // TOP]
    counts = counts_of(chosen) // 2
    y, ends = rows.clone(), counts.cumsum(0)
    for i in range(EXPERTS):
        start = 0 if i == 0 else ends[i - 1]
        y[start : ends[i]] = F.linear(F.linear(rows[start : ends[i]], p.up[i]), p.down[i])
    return y.view(*chosen.shape, -1).sum(1)


def masks_by_name(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop over modules by name with one mask for each expert, as in Switch Transformers."""
    mask = F.one_hot(chosen[:, 0], EXPERTS).bool()
    y, hit = torch.zeros_like(x), mask.sum(dim=0)
    numbers = torch.nonzero(hit, as_tuple=True)[0].tolist()
    for e in numbers:
        y[mask[:, e]] = p.named[f"expert_{e}"](x[mask[:, e]])
    return y * scale[:, :1]


def masks_of_others(p: Experts, x: Tensor, chosen: Tensor, scale: Tensor) -> Tensor:
    """A loop that leaves out experts with one or two rows, by masks and names."""
    mask = F.one_hot(chosen[:, 0], EXPERTS).bool()
    y, hit = torch.zeros_like(x), mask.sum(dim=0) > 2
    for e in torch.nonzero(hit, as_tuple=True)[0].tolist():
        y[mask[:, e]] = p.named[f"expert_{e}"](x[mask[:, e]])
    return y * scale[:, :1]


LOOPS: dict[str, Loop] = {
    f.__name__: f
    for f in (
        tables, one_more, some_nowhere, with_biases, by_the_number, some_leave_rows_alone,
        some_by_comparison, from_a_list, tied_ones, unlike_ones, ones_of_other_settings,
        with_room, one_way_of_two, unhit, numbers_that_leave_some_out,
        every_expert, every_expert_in_place, if_any_rows, unasked, numbered_experts,
        some_are_identities, tables_of_all, all_by_name, all_unlike, matrices_in_a_list,
        by_a_table_of_numbers, scaled_by_number, fewer_than_matrices, in_turns, several_of_all,
        cut_by_counts, cut_for_modules, cut_by_sums, cut_by_running_sums, cut_in_part,
        masks_by_name, masks_of_others,
    )
}  # fmt: skip


def batch(tokens: int, seed: int, lean: float = 0.0) -> dict[str, Tensor]:
    """lean: how far the tokens lie towards one side, and so to few experts."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(2, tokens, WIDTH, generator=g) + lean * torch.linspace(-1, 1, WIDTH)
    labels = torch.randint(0, CLASSES, (2, tokens), generator=g)
    labels[1, 1:] = -100
    return {"x": x, "labels": labels}
