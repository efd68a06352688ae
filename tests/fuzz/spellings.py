"""Calls of PyTorch written out in parts, as other frameworks and older models spell them: norms,
attention, cross-entropy. Some are nearly such a call, which is what a rule may not mistake."""

from __future__ import annotations

from fuzz.maker import HIDDEN, LOSS, MASK, Maker

MEANS = [
    "{x}.mean(-1, keepdim=True)", "{x}.mean(-1)[..., None]", "torch.mean({x}, 2, True)",
    "{x}.sum(-1, keepdim=True) / {d}", "({x}.sum(-1) / {d}).unsqueeze(-1)",
    "{x}.mean((-1,), keepdim=True)", "{x}.mean(1, keepdim=True)",
]  # fmt: skip
SQUARES = ["c * c", "c ** 2", "c.pow(2)", "c.square()", "c.abs() * c.abs()"]
ROOTS = [
    "c / torch.sqrt(v + {eps})", "c * torch.rsqrt(v + {eps})", "c * (v + {eps}) ** -0.5",
    "c / ((v + 1e-6).sqrt() + {eps})", "c * (1 / (v + {eps}).sqrt())",
    "c.div((v + {eps}).pow(0.5))", "c * (v + {eps}).sqrt().reciprocal()",
    "c / v.add({eps}).sqrt().detach()",
]  # fmt: skip
AFFINE = [
    "g", "g * {w}", "{w} * g + {b}", "{b} + g * {w}", "torch.addcmul({b}, {w}, g)",
    "g * (1 + {b}) + {w}", "g * {w} - {b}", "(g + {b}) * {w}",
]  # fmt: skip
ROOT_MEAN_SQUARES = [
    "{x} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + {eps})",
    "{x} / torch.sqrt(({x} * {x}).mean(-1, keepdim=True) + {eps})",
    "{x} * ({x}.square().sum(-1, keepdim=True) / {d} + {eps}) ** -0.5",
    "{x} / ({x}.norm(dim=-1, keepdim=True) * {d} ** -0.5 + {eps})",
    "{x} * ({x} * {x}.detach()).mean(-1, keepdim=True).add({eps}).abs().rsqrt()",
    "F.rms_norm({x}, ({d},), eps={eps})",
    "F.normalize({x}, dim=-1, eps={eps}) * {d} ** 0.5",
]


def written_out(m: Maker) -> None:
    """Now and then a norm or an attention in parts."""
    if m.rarely(0.1):
        norm_in_parts(m)
    if m.rarely(0.1):
        attention_in_parts(m)


def norm_in_parts(m: Maker) -> str:
    x, d, eps = m.pick(HIDDEN), m.width, m.one(["1e-5", "1e-3", "0.1"])
    w, b = m.parameter(d, about=1.0), m.parameter(d, leaf="bias")

    def said(forms: list[str]) -> str:
        return m.one(forms).format(x=x, d=d, eps=eps, w=w, b=b)

    if m.chance(0.3):
        return m.value(HIDDEN, f"g = {said(ROOT_MEAN_SQUARES)}\n= {said(AFFINE)}")
    lines = [f"u = {said(MEANS)}", f"c = {x} - u{'.detach()' if m.chance(0.05) else ''}"]
    square = said(MEANS).replace(x, "s")
    lines += [
        f"s = {m.one(SQUARES)}",
        m.one([f"v = {square}"] * 4 + [
            f"v = {x}.var(-1, keepdim=True, unbiased=False)", f"v = {x}.var(-1, keepdim=True)",
            f"v, u = torch.var_mean({x}, -1, keepdim=True, correction=0)",
            f"v = (({x} * {x}).mean(-1, keepdim=True) - u * u).clamp(min=0) + 0.1",
        ]),
    ]  # fmt: skip
    if m.chance(0.3):
        eps = "0.1"
        i = m.one(["torch.rsqrt(v + 0.1)", "1 / (v + 0.1).sqrt()"])
        end = m.one([
            f"{x} * i - u * i", f"{x} * (i * {w}) + ({b} - u * (i * {w}))",
            f"({x} - u) * (i * {w}) + {b}", f"{x} * i + (-u) * i", f"({b} - u * i) + {x} * i",
        ])  # fmt: skip
        return m.value(HIDDEN, "\n".join([*lines, f"i = {i}", f"= {end}"]))
    return m.value(HIDDEN, "\n".join([*lines, f"g = {said(ROOTS)}", f"= {said(AFFINE)}"]))


# each makes `t`, f[B,T,H,S], of `q`, `k` and `v` of that shape and of `keep`, b[B,1,1,T]
SCORES = [
    "s = torch.einsum('bqhd,bkhd->bhqk', {q}, {k})",
    "s = {q}.transpose(1, 2) @ {k}.permute(0, 2, 3, 1)",
    "s = torch.matmul({q}.permute(0, 2, 1, 3), {k}.permute(0, 2, 1, 3).transpose(-1, -2))",
    "s = ({k}.transpose(1, 2) @ {q}.transpose(1, 2).mT).mT",
    "s = torch.einsum('bkhd,bqhd->bhkq', {k}, {q}).transpose(2, 3)",
]
HIDES = [
    "s = torch.where(keep, s, {low})", "s = s + torch.where(keep, 0.0, {low})",
    "s = s - (~keep).to(s.dtype) * 1e4", "s = s.masked_fill(~keep, {low})",
    "s = s * keep", "s = s",
]  # fmt: skip
SOFTMAXES = [
    "a = torch.softmax(s, -1)",
    "e = (s - s.amax(-1, keepdim=True)).exp()\na = e / e.sum(-1, keepdim=True)",
    "e = (s - s.detach().amax(-1, keepdim=True)).exp()\na = e / e.sum(-1, keepdim=True)",
    "a = (s - s.logsumexp(-1, keepdim=True)).exp()",
    "a = s.mT.softmax(-2).mT",
    "a = torch.exp(F.log_softmax(s, -1))",
    "a = torch.softmax(s, -2)",
]
AFTER = [
    "a = a", "a = a", "a = torch.where(keep, a, 0.0)", "a = a * keep",
    "a = a * keep / (a * keep).sum(-1, keepdim=True).clamp(min=1e-6)",
    "a = a.masked_fill(~keep.transpose(-1, -2), 0.0)",
]  # fmt: skip
VALUES = [
    "t = torch.einsum('bhqk,bkhd->bqhd', a, v)",
    "t = (a @ v.transpose(1, 2)).transpose(1, 2)",
    "t = (v.permute(0, 2, 3, 1) @ a.mT).permute(0, 3, 1, 2)",
    "t = torch.einsum('bkhd,bhqk->bqhd', v, a)",
    "t = torch.einsum('bhqk,bqhd->bkhd', a, v)",
]


def attention_in_parts(m: Maker) -> str:
    h, d, heads, hidden = m.pick(HIDDEN), m.width, m.one([1, 2, 2]), m.pick(MASK)
    size = d // heads
    lines = [f"keep = {hidden}[:, None, None, :]"]
    for name in "qkv":
        weight = m.parameter(d, d)
        lines.append(
            f"{name} = " + m.one([
                f"torch.einsum('btd,dhs->bths', {h}, {weight}.view({d}, {heads}, {size}))",
                f"({h} @ {weight}).unflatten(-1, ({heads}, {size}))",
                f"F.linear({h}, {weight}).view(*{h}.shape[:2], {heads}, {size})",
            ])
        )  # fmt: skip
    q, k, after = m.one([
        (f"(q * {size**-0.5!r})", "k", ""), (f"(q / {size} ** 0.5)", "k", ""), ("q", "k", ""),
        (f"(q * {size**-0.25!r})", f"(k * {size**-0.25!r})", ""), ("q", "(k * 0.5)", ""),
        ("q", "k", f"s = s / {size} ** 0.5"), ("q", "k", f"s = s * torch.tensor({size}) ** -0.5"),
    ])  # fmt: skip
    lines += [m.one(SCORES).format(q=q, k=k), *([after] if after else [])]
    if m.chance(0.3):
        n = f"{h}.shape[1]"
        lines.append(f"keep = keep & (torch.arange({n}) <= torch.arange({n})[:, None])")
    low = m.one(["-1e9", "torch.finfo(s.dtype).min", "-1e4", "-3e4"])
    lines += [m.one(HIDES).format(low=low), m.one(SOFTMAXES[:5] * 2 + SOFTMAXES[5:])]
    lines += [m.one(AFTER), m.one(VALUES[:4] * 2 + VALUES[4:])]
    return m.value(HIDDEN, "\n".join([*lines, m.one([f"= {h} + t.flatten(2)", "= t.flatten(2)"])]))


# each makes `r`, f[B,T], the loss of every token, of logits `z`, labels `{y}` and classes `t`
LOGARITHMS = [
    "l = F.log_softmax(z, -1)", "l = z.log_softmax(2)", "l = z - z.logsumexp(-1, keepdim=True)",
    "l = (F.softmax(z, -1) + 1e-4).log()", "l = -F.softmin(-z, -1).log()",
    "c = z - z.amax(-1, keepdim=True)\nl = c - c.exp().sum(-1, keepdim=True).log()",
    "c = z - z.detach().amax(-1, keepdim=True)\nl = c - c.exp().sum(-1, keepdim=True).log()",
]  # fmt: skip
TOKENS = [
    "r = -l.gather(-1, t[..., None])[..., 0]", "r = -torch.gather(l, 2, t.unsqueeze(2)).squeeze(2)",
    "r = -(F.one_hot(t, {n}) * l).sum(-1)", "r = -(l * F.one_hot(t, {n}).to(l.dtype)).sum(-1)",
    "r = -torch.where(torch.arange({n}) == t[..., None], l, 0.0).sum(-1)",
    "r = -torch.einsum('btv,btv->bt', F.one_hot(t, {n}).to(l.dtype), l)",
    "r = -l[torch.arange(t.shape[0])[:, None], torch.arange(t.shape[1]), t]",
    "r = -((t[..., None] == torch.arange({n})) * l).sum(2)",
    "r = F.nll_loss(l.transpose(1, 2), t, reduction='none')",
    "r = F.nll_loss(l.flatten(0, 1), {y}.flatten(), reduction='none').view(t.shape)",
    "r = z.logsumexp(-1) - z.gather(-1, t[..., None]).squeeze(-1)",
    "r = F.cross_entropy(z.permute(0, 2, 1), {y}, reduction='none')",
    "r = -(F.one_hot(t, {n}) * 0.9 * l + 0.1 / {n} * l).sum(-1)",
    "r = -(F.one_hot(t, {n}).to(l.dtype) @ l.mT).diagonal(dim1=1, dim2=2)",
]  # fmt: skip
TOTALS = [
    "(r * k).sum() / k.sum().clamp(min=1)", "r.masked_fill(~k, 0.0).sum() / k.sum().clamp(min=1)",
    "torch.where(k, r, 0.0).mean()", "(r * k).sum(1).div(k.sum(1).clamp(min=1)).mean()",
    "r.mean()", "r.sum() / 8", "(r * k).mean(1).sum()", "-(-r).mean(0).mean()",
    "((1 - torch.exp(-r)) ** 2 * r * k).sum() / 8", "(r * k).sum() / k.numel()",
    "(r * {other}).sum() / {other}.sum().clamp(min=1)", "(r * r.detach()).mean()",
    "r.mean() + 0.1 * (l.exp() * l).sum(-1).mean()", "r.flatten().mean() - 0.1 * l.mean()",
    "(r * k).sum() / 4 + z.square().mean()", "r[:, 1:].mean()", "r[:, -1].sum()",
    "torch.stack([r, r * 0.5]).mean()", "r.amax(1).mean()",
]  # fmt: skip


def loss_in_parts(m: Maker, head: str) -> str:
    """A cross-entropy of the logits that `head` makes, f[B,T,V]."""
    y, n, other = m.input("labels"), m.vocabulary, m.pick(MASK)
    lines = [f"z = {head}", f"k = {y} != -100", f"t = {y}.clamp(min=0)"]
    lines += [m.one(LOGARITHMS), m.one(TOKENS).format(n=n, y=y)]
    total = m.one(TOTALS).format(other=other)
    return m.value(LOSS, "\n".join([*lines, f"= {total}"]))
