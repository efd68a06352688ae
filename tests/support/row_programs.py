"""Small random programs that mask, pool and ignore rows in every spelling, for row demand.

A program is a list of stages on `h f[B,T,D]` and a loss; `program(seed)` draws one, `batches(seed)`
its data. Each name of a table is one way of saying something, so that a failing program reads as
a list of names.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tiny import compiled, eager, execute_packed, trained
from tiny import plain as by_the_users_names
from torch import Tensor, nn

SIZE, LENGTH, WIDTH, HEADS, CLASSES, WORDS = 3, 5, 8, 2, 4, 11
LEAST = torch.finfo(torch.float32).min
Batch = dict[str, Tensor]


class Parts(nn.Module):
    """The parameters that stages share, and the batch they look at."""

    ahead: Tensor
    itself: Tensor
    class_weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.inner = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.qkv = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("ahead", torch.ones(LENGTH, LENGTH).triu(1).bool())
        self.register_buffer("itself", torch.eye(LENGTH, dtype=torch.bool))
        self.register_buffer("class_weights", torch.tensor([0.0, 1.0, 0.5, 2.0]))


# ---- masks: b[B,T], true at the tokens that a program takes

BOOLS: dict[str, Callable[[Batch], Tensor]] = {
    "bool()": lambda d: d["mask"].bool(),
    "== 1": lambda d: d["mask"] == 1,
    "!= 0": lambda d: d["mask"] != 0,
    "ge(1)": lambda d: d["mask"].ge(1),
    "> 0": lambda d: d["mask"] > 0,
    "~(== 0)": lambda d: ~(d["mask"] == 0),
    "eq(0).logical_not()": lambda d: d["mask"].eq(0).logical_not(),
    "~lt(1)": lambda d: ~d["mask"].lt(1),
    "1 - m == 0": lambda d: (1 - d["mask"]) == 0,
    "~(1 - m).bool()": lambda d: ~(1 - d["mask"]).bool(),
    "float() > 0.5": lambda d: d["mask"].float() > 0.5,
    "1 - float() == 0": lambda d: (1.0 - d["mask"].float()) == 0,
    "float() == 1": lambda d: d["mask"].float() == 1,
    "bool().float().bool()": lambda d: d["mask"].bool().float().bool(),
    "int() == 1": lambda d: d["mask"].int() == 1,
    "labels != -100": lambda d: d["labels"] != -100,
    "types": lambda d: d["types"].bool(),
    "types == 0": lambda d: d["types"] == 0,
    "m & types": lambda d: d["mask"].bool() & d["types"].bool(),
    "m | types": lambda d: d["mask"].bool() | d["types"].bool(),
    "(m * types) > 0": lambda d: (d["mask"] * d["types"]) > 0,
    "~(labels == -100) & m": lambda d: ~(d["labels"] == -100) & d["mask"].ne(0),
    "ids": lambda d: d["ids"] != 3,
    "real": lambda d: d["real"],
    "~real": lambda d: ~d["real"],
    "padding": lambda d: d["mask"].bool().logical_not(),
}
FLOATS: dict[str, Callable[[Batch], Tensor]] = {
    "float()": lambda d: d["mask"].float(),
    "1 - m": lambda d: 1.0 - d["mask"].float(),
    "(1 - m).float()": lambda d: (1 - d["mask"]).float(),
    "1 - (~ge(1)).float()": lambda d: 1 - (~d["mask"].ge(1)).float(),
    "(== 0).float()": lambda d: (d["mask"] == 0).float(),
    "2 m": lambda d: d["mask"].float() * 2,
    "m - 1": lambda d: d["mask"].float() - 1.0,
    "m * types": lambda d: d["mask"].float() * d["types"].float(),
    "m * (1 - types)": lambda d: d["mask"].float() * (1 - d["types"].float()),
    "weights": lambda d: d["weights"],
    "labelled": lambda d: (d["labels"] != -100).float(),
    "real.float()": lambda d: d["real"].float(),
    "int mask": lambda d: d["mask"],
    "bool mask": lambda d: d["mask"].bool(),
}
Stage = Callable[[Parts, Tensor, Batch, int], Tensor]
Loss = Callable[[Parts, Tensor, Batch], Tensor]


def _wide(mask: Tensor) -> Tensor:
    return mask.unsqueeze(-1)


def filling(name: str, side: str) -> Stage:
    """A stage that keeps the rows a mask takes, or those it leaves; the rest becomes a number or
    other rows."""

    def stage(p: Parts, h: Tensor, d: Batch, i: int) -> Tensor:
        m = _wide(BOOLS[name](d))
        other = torch.tanh(p.inner[i % 4](h))
        match side:
            case "fill":
                return h.masked_fill(~m, 0.0)
            case "fill taken":
                return h.masked_fill(m, 0.0)
            case "fill -1":
                return h.masked_fill(~m, -1.0)
            case "where":
                return torch.where(m, h, 0.0)
            case "where left":
                return torch.where(m, 0.5, h)
            case "other":
                return torch.where(m, h, other)
            case "other first":
                return torch.where(m, other, h)
            case _:
                return torch.where(m, other, 0.0)

    return stage


SIDES = (
    "fill", "fill taken", "fill -1", "where", "where left", "other", "other first", "other or 0",
)  # fmt: skip


def product(name: str, form: str) -> Stage:
    def stage(p: Parts, h: Tensor, d: Batch, i: int) -> Tensor:
        m = _wide(FLOATS[name](d))
        match form:
            case "times":
                return h * m
            case "mask first":
                return m * h
            case "ratio":
                return h * m / (1.0 + m)
            case _:
                return h * (1 - m.float())

    return stage


FORMS = ("times", "mask first", "ratio", "one minus")


def _split(x: Tensor) -> Tensor:
    return x.view(x.shape[0], x.shape[1], HEADS, -1).transpose(1, 2)


def attending(kind: str, name: str) -> Stage:
    """Attention over the tokens that a mask takes."""

    def stage(p: Parts, h: Tensor, d: Batch, i: int) -> Tensor:
        q, k, v = (_split(x) for x in p.qkv[i % 2](h).chunk(3, dim=-1))
        m = BOOLS[name](d)[:, None, None, :]
        match kind:
            case "none":
                y = F.scaled_dot_product_attention(q, k, v)
            case "causal":
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            case "least":
                added = torch.zeros(m.shape).masked_fill(~m, LEAST)
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=added)
            case "weak":
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=(1 - m.float()) * -1e4)
            case "causal and least":
                added = torch.zeros(m.shape).masked_fill(~m, LEAST)
                added = added.masked_fill(p.ahead, LEAST)
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=added)
            case "by hand":
                s = (q @ k.transpose(-1, -2) / 2).masked_fill(~m, LEAST)
                y = s.softmax(-1) @ v
            case _:  # bools; each token sees itself, as a row of nothing is NaN in eager
                seen = m | p.itself
                y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return h + y.transpose(1, 2).flatten(2)

    return stage


KINDS = ("none", "causal", "least", "weak", "causal and least", "by hand", "bools")
PLAIN: dict[str, Stage] = {
    "linear": lambda p, h, d, i: torch.tanh(p.inner[i % 4](h)),
    "residual": lambda p, h, d, i: h + F.gelu(p.inner[i % 4](h)),
    "norm": lambda p, h, d, i: p.norm(h),
    "places": lambda p, h, d, i: h + p.places.weight,
    "given places": lambda p, h, d, i: h + p.places(d["places"]),
    "mean given back": lambda p, h, d, i: h + h.mean(1, keepdim=True),
    "shifted": lambda p, h, d, i: torch.cat([h[:, 1:], h[:, :1]], 1),
    "softmax of tokens": lambda p, h, d, i: h.softmax(1),
    "first given back": lambda p, h, d, i: h + h[:, :1],
    "flattened": lambda p, h, d, i: F.relu(p.inner[i % 4](h.flatten(0, 1))).view_as(h),
    "exp": lambda p, h, d, i: torch.exp(0.3 * h),
}  # fmt: skip

# ---- one row of each sequence: f[B,D]

POOLS: dict[str, Callable[[Tensor, Batch, Tensor, Tensor], Tensor]] = {
    # h, the batch, a mask of bools b[B,T,1], one of floats f[B,T,1]
    "sum": lambda h, d, b, m: (h * m).sum(1),
    "mean": lambda h, d, b, m: (h * m).mean(1),
    "ratio": lambda h, d, b, m: (h * m).sum(1) / m.float().sum(1).clamp(min=1e-6),
    "filled sum": lambda h, d, b, m: h.masked_fill(~b, 0.0).sum(1),
    "filled mean": lambda h, d, b, m: h.masked_fill(b, 0.0).mean(1),
    "max": lambda h, d, b, m: h.masked_fill(~b, -1e4).amax(1),
    "min": lambda h, d, b, m: -(-h).masked_fill(~b, -1e4).amax(1),
    "max of products": lambda h, d, b, m: (h * m).amax(1),
    "logsumexp": lambda h, d, b, m: h.masked_fill(~b, -50.0).exp().sum(1).log(),
    "weights": lambda h, d, b, m: (h * torch.zeros_like(m.float()).masked_fill(~b, -9.0)
                                   .softmax(1)).sum(1),
    "first": lambda h, d, b, m: h[:, 0],
    "last": lambda h, d, b, m: h[:, -1],
    "last, dim kept": lambda h, d, b, m: h[:, -1:].flatten(1),
    "first filled": lambda h, d, b, m: h.masked_fill(~b, 0.0)[:, 0],
    "by length": lambda h, d, b, m: h[torch.arange(SIZE), d["last"]],
    "by length, weighed": lambda h, d, b, m: (h * m)[torch.arange(SIZE), d["last"]],
    "by number": lambda h, d, b, m: h.flatten(0, 1).index_select(0, d["numbers"]),
    "gather": lambda h, d, b, m: h.gather(1, d["last"][:, None, None].expand(-1, 1, WIDTH))[:, 0],
    "all": lambda h, d, b, m: h.mean(1),
}  # fmt: skip


def _each(p: Parts, h: Tensor, d: Batch, **more: Any) -> Tensor:
    """The loss of each token, f[B,T]."""
    logits = p.head(h)
    flat = F.cross_entropy(logits.flatten(0, 1), d["labels"].flatten(), reduction="none", **more)
    return flat.view(h.shape[:2])


def tokens(p: Parts, h: Tensor, labels: Tensor, **more: Any) -> Tensor:
    return F.cross_entropy(p.head(h).flatten(0, 1), labels.flatten(), **more)


TOKEN_LOSSES: dict[str, Callable[[Parts, Tensor, Batch, Tensor, Tensor], Tensor]] = {
    # losses of h, the batch, a mask of bools b[B,T] and one of floats f[B,T]
    "ignored": lambda p, h, d, b, m: tokens(p, h, d["labels"]),
    "summed": lambda p, h, d, b, m: tokens(p, h, d["labels"], reduction="sum"),
    "every token": lambda p, h, d, b, m: tokens(p, h, d["tags"]),
    "ignored 0": lambda p, h, d, b, m: tokens(p, h, d["tags"], ignore_index=0),
    "class weights": lambda p, h, d, b, m: tokens(
        p, h, d["labels"], weight=p.class_weights
    ),
    "labels where": lambda p, h, d, b, m: tokens(p, h, torch.where(b, d["tags"], -100)),
    "labels filled": lambda p, h, d, b, m: tokens(p, h, d["labels"].masked_fill(b, -100)),
    "each weighed": lambda p, h, d, b, m: (_each(p, h, d) * m).sum(),
    "each weighed, ratio": lambda p, h, d, b, m: (
        (_each(p, h, d) * m).sum() / m.float().sum().clamp(min=1e-6)
    ),
    "each weighed, flat": lambda p, h, d, b, m: (
        (_each(p, h, d).flatten() * m.flatten()).sum()
    ),
    "each where": lambda p, h, d, b, m: torch.where(b, _each(p, h, d), 0.0).sum(),
    "each sequence": lambda p, h, d, b, m: (
        (_each(p, h, d) * m).sum(1) / m.float().sum(1).clamp(min=1e-6)
    ).mean(),
    "each plus": lambda p, h, d, b, m: (_each(p, h, d) + h.sum(-1)).square().mean(),
    "shifted": lambda p, h, d, b, m: tokens(p, h[:, :-1], d["labels"][:, 1:]),
    "squares": lambda p, h, d, b, m: (p.head(h).square().sum(-1) * m).sum(),
    "squares where": lambda p, h, d, b, m: torch.where(
        b.unsqueeze(-1), p.head(h).square(), 0.0
    ).mean(),
    "two": lambda p, h, d, b, m: (
        tokens(p, h, d["labels"]) + (h * m.unsqueeze(-1)).sum(1).square().mean()
    ),
    "filled, then ignored": lambda p, h, d, b, m: tokens(
        p, h.masked_fill(~b.unsqueeze(-1), 0.0), d["labels"]
    ),
}  # fmt: skip


def _pooled(p: Parts, vector: Tensor, d: Batch, loss: str) -> Tensor:
    logits = p.head(vector)
    match loss:
        case "classes":
            return F.cross_entropy(logits, d["classes"])
        case "some classes":
            return F.cross_entropy(logits, d["some"])
        case "weighed":
            return (F.cross_entropy(logits, d["classes"], reduction="none") * d["each"]).sum()
        case _:
            return logits.square().mean()


POOLED = ("classes", "some classes", "weighed", "squares")


@dataclass(frozen=True)
class Program:
    """Names of what it does, in order, and the functions."""

    names: tuple[str, ...]
    stages: tuple[Stage, ...]
    loss: Loss

    def __str__(self) -> str:
        return " | ".join(self.names)


class Model(Parts):
    """A program with its parameters: the batch goes in, the loss comes out."""

    def __init__(self, program: Program) -> None:
        torch.manual_seed(0)
        super().__init__()
        self.program = program

    def forward(self, **d: Tensor) -> Tensor:
        h = self.words(d["ids"])
        for i, stage in enumerate(self.program.stages):
            h = stage(self, h, d, i)
        return self.program.loss(self, h, d)


def stage(draw: random.Random) -> tuple[str, Stage]:
    """A random stage and its name; stages with masks are more likely."""
    match draw.choice(("plain", "fill", "fill", "product", "attend", "attend")):
        case "plain":
            name = draw.choice([*PLAIN])
            return name, PLAIN[name]
        case "fill":
            mask, side = draw.choice([*BOOLS]), draw.choice(SIDES)
            return f"{side}({mask})", filling(mask, side)
        case "product":
            mask, form = draw.choice([*FLOATS]), draw.choice(FORMS)
            return f"{form}({mask})", product(mask, form)
        case _:
            mask, kind = draw.choice([*BOOLS]), draw.choice(KINDS)
            return f"attention {kind}({mask})", attending(kind, mask)


def pooled(pool: str, b: str, m: str, end: str = "classes") -> Loss:
    """A loss of one row for each sequence, pooled with these masks."""

    def loss(p: Parts, h: Tensor, d: Batch) -> Tensor:
        vector = POOLS[pool](h, d, _wide(BOOLS[b](d)), _wide(FLOATS[m](d)))
        return _pooled(p, vector, d, end)

    return loss


def loss(draw: random.Random) -> tuple[str, Loss]:
    """A random loss, and its name."""
    b, m = draw.choice([*BOOLS]), draw.choice([*FLOATS])
    if draw.random() < 0.5:
        pool, end = draw.choice([*POOLS]), draw.choice(POOLED)
        return f"{pool}({b}; {m}) {end}", pooled(pool, b, m, end)
    kind = draw.choice([*TOKEN_LOSSES])
    made = TOKEN_LOSSES[kind]
    return f"{kind}({b}; {m})", lambda p, h, d: made(p, h, d, BOOLS[b](d), FLOATS[m](d))


def program(seed: int) -> Program:
    draw = random.Random(seed)
    stages = [stage(draw) for _ in range(draw.randint(1, 4))]
    end, made = loss(draw)
    return Program((*(n for n, _ in stages), end), tuple(s for _, s in stages), made)


def batch(seed: int, kind: str = "ragged") -> Batch:
    """Random data. kind: `ragged`, `holes`, `full`, or `empty`: no token is real or labelled."""
    g = torch.Generator().manual_seed(seed)

    def ints(most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=g)

    mask = (torch.arange(LENGTH) < 1 + ints(LENGTH, SIZE, 1)).long()
    if kind == "holes":
        mask = ints(2, SIZE, LENGTH)
    if kind == "full":
        mask = torch.ones_like(mask)
    if kind == "empty":
        mask = torch.zeros_like(mask)
    tags = ints(CLASSES, SIZE, LENGTH)
    labelled = (ints(3, SIZE, LENGTH) == 0) & (kind != "empty")
    if kind != "empty":
        labelled[0, 1] = True
    classes = ints(CLASSES, SIZE)
    last = mask.sum(1).clamp(min=1) - 1
    return {
        "ids": ints(WORDS, SIZE, LENGTH), "mask": mask, "real": mask.bool(), "tags": tags,
        "labels": tags.masked_fill(~labelled, -100), "types": ints(2, SIZE, LENGTH),
        "weights": ints(3, SIZE, LENGTH).float(), "classes": classes,
        "places": ints(LENGTH, SIZE, LENGTH),
        "some": torch.where(torch.tensor([True, False, True]), classes, -100),
        "each": torch.tensor([1.0, 0.0, 2.0]), "last": last,
        "numbers": last + torch.arange(SIZE) * LENGTH,
    }  # fmt: skip


def differences(found: Batch, exact: Batch, plain: Batch) -> list[str]:
    """The names of tensors that differ by more than rounding. exact, plain: eager's in fp64, fp32.

    A program may amplify rounding; then eager's own numbers show it.
    """
    scale = max([float(t.norm()) for t in exact.values() if t.isfinite().all()], default=0.0)
    wrong = [f"{name}: one has it" for name in {*found} ^ {*exact}]
    for name in {*found} & {*exact}:
        own, truth, other = found[name].double(), exact[name], plain[name].double()
        if not torch.equal(own.isfinite(), other.isfinite()):
            wrong.append(f"{name}: {own.norm():.4g}, eager {other.norm():.4g}")
            continue
        own, truth, other = (t.nan_to_num(0.0, 0.0, 0.0) for t in (own, truth, other))
        allowed = 20 * float((other - truth).norm()) + 1e-5 * float(truth.norm()) + 1e-6 * scale
        if not float((own - truth).norm()) <= allowed:
            wrong.append(f"{name}: {own.norm():.6g}, eager {truth.norm():.6g}")
    return sorted(wrong)


def wrong_numbers(made: Program | nn.Module, data: list[Batch]) -> list[str]:
    """What differs from eager where only the rows that are read are computed."""
    model = Model(made) if isinstance(made, Program) else made
    captured = compiled(model, data[0])
    forward = captured.packed(["loss"])
    if forward is None:
        return []
    graph = captured.differentiated(trained(captured), forward)
    names = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
    wrong = []
    for n, given in enumerate(data):
        found = by_the_users_names(execute_packed(captured, graph, given, names)[0])
        exact, plain = (eager(model, given, t) for t in (torch.float64, torch.float32))
        # a tensor without a gradient in eager has zeros here
        for name in {*found} - {*exact}:
            if not found[name].any():
                del found[name]
        for name in {*exact} - {*found}:
            if not exact[name].any():
                del exact[name]
        wrong += [f"batch {n}: {line}" for line in differences(found, exact, plain)]
    return wrong
