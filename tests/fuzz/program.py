"""Grammar of the fuzzer: a seed becomes a case, a tree of plain values that JSON can hold; see
`maker.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fuzz.cleaned import clean
from fuzz.effects import unusual
from fuzz.maker import (
    ACTIVATIONS,
    HIDDEN,
    LOSS,
    MASK,
    ODD_OUTPUTS,
    OUTPUT_NAMES,
    POOLED,
    POSITIONS,
    Maker,
)
from fuzz.spellings import loss_in_parts, written_out
from fuzz.stops import perhaps_complex, stops

# ---- where values begin


def first(m: Maker) -> str:
    d = m.width
    if m.chance(0.2):
        return m.value(HIDDEN, m.input("features"))
    if m.chance(0.2):
        inner = m.module(f"nn.Embedding({m.vocabulary}, {d}{m.one(['', '', ', padding_idx=0'])})")
        return m.value(HIDDEN, f"{inner}({m.input('ids')})")
    table = m.parameter(m.vocabulary, d)
    form = m.one([f"F.embedding({m.input('ids')}, {table})"] * 3 + [f"{table}[{m.input('ids')}]"])
    return m.value(HIDDEN, form)


def positions(m: Maker) -> str:
    h, table = m.pick(HIDDEN), m.parameter(POSITIONS, m.width)
    where = f"torch.arange({h}.shape[1])"
    form = [f"{table}[:{h}.shape[1]]", f"F.embedding({where}, {table})", f"{table}[{where}]"]
    if m.chance(0.2):
        k = m.pick(MASK)
        form = [f"F.embedding(({k}.long().cumsum(1) - 1).clamp(min=0), {table})"]
    return m.value(HIDDEN, f"{h} + {m.one(form)}")


def mask(m: Maker) -> str:
    """b[B,T], True at real tokens or, now and then, at the others."""
    have = [n for n, k in m.kinds.items() if k == MASK]
    forms: list[Callable[[], str]] = [
        lambda: _truth(m, m.input("mask")),
        lambda: _truth(m, m.input("mask")),
        lambda: _truth(m, m.input("mask")),
        lambda: f"{m.input('ids')} != 0",
        lambda: f"{m.input('ids')}.ne(0)",
        lambda: f"torch.arange({m.pick(HIDDEN)}.shape[1]) < {m.input('lengths')}[:, None]",
        lambda: f"torch.arange({m.pick(HIDDEN)}.shape[1])[None] >= {m.input('lengths')}[:, None]",
        lambda: f"{m.input('labels')} != -100",
    ]
    if have:
        a, b = m.one(have), m.one(have)
        forms += [
            lambda: f"~{a}",
            lambda: f"{a}.logical_not()",
            lambda: f"{a} & {b}",
            lambda: f"{a} | {b}",
            lambda: f"{a} & ({m.input('ids')} != 3)",
            lambda: f"({a}.long().cumsum(1) > 0) & {a}",
            lambda: f"F.pad({a}[:, 1:], (0, 1))",
            lambda: f"{a} == {b}",
            lambda: f"(1 - {a}.long()) == 0",
        ]
    return m.value(MASK, m.one(forms)())


def _truth(m: Maker, x: str) -> str:
    return m.one([
        f"{x}.bool()", f"{x} != 0", f"{x} == 1", f"{x} > 0", f"{x}.to(torch.bool)",
        f"(1 - {x}.long()) == 0", f"~({x} == 0)", f"{x}.eq(1)", f"{x}.long() >= 1", f"{x} == 0",
    ])  # fmt: skip


# ---- hidden from hidden


def linear_code(m: Maker, x: str, d_in: int, d_out: int) -> str:
    bias = m.parameter(d_out, leaf="bias") if m.chance(0.7) else "None"
    form = m.dice.random()
    if form < 0.55:
        return f"F.linear({x}, {m.parameter(d_out, d_in)}, {bias})"
    if form < 0.75:
        inner = m.module(f"nn.Linear({d_in}, {d_out}, bias={bias != 'None'})")
        return f"{inner}({x})"
    product = f"{x} @ {m.parameter(d_in, d_out)}"
    if form > 0.93:
        product = f"torch.matmul({x}, {m.parameter(d_out, d_in)}.t())"
    return product if bias == "None" else f"({product} + {bias})"


def linear(m: Maker) -> str:
    return m.value(HIDDEN, linear_code(m, m.pick(HIDDEN), m.width, m.width))


def activation(m: Maker, x: str) -> str:
    return m.one(ACTIVATIONS).replace("{}", x)


def feed_forward(m: Maker) -> str:
    h, wide = m.pick(HIDDEN), m.one([m.width, 2 * m.width, 5])
    inner = m.value(HIDDEN, linear_code(m, h, m.width, wide))
    # a value wider than the rest of the model: only the layer made below may read it
    m.kinds[inner] = "wide"
    m.body[-1]["kind"] = "wide"
    act = activation(m, inner)
    if m.chance(0.15):
        act = f"{m.module(m.one(['nn.GELU()', 'nn.Tanh()', 'nn.ReLU()']))}({inner})"
    out = linear_code(m, f"({act})", wide, m.width)
    return m.value(HIDDEN, f"{h} + {out}" if m.chance(0.6) else out)


def norm(m: Maker) -> str:
    h, d = m.pick(HIDDEN), m.width
    form = m.one(["layer", "layer", "plain", "module", "rms", "sum", "unit"])
    if form == "layer":
        w, b = m.parameter(d, about=1.0), m.parameter(d, leaf="bias")
        return m.value(HIDDEN, f"F.layer_norm({h}, ({d},), {w}, {b}, {m.one(['1e-5', '1e-3'])})")
    if form == "plain":
        return m.value(HIDDEN, f"F.layer_norm({h}, ({d},), eps=1e-3)")
    if form == "module":
        return m.value(HIDDEN, f"{m.module(f'nn.LayerNorm({d})')}({h})")
    if form == "sum":
        w, b, k = m.parameter(d, about=1.0), m.parameter(d, leaf="bias"), m.pick(HIDDEN)
        return m.value(HIDDEN, f"F.layer_norm({h} + {k}, ({d},), {w}, {b})")
    if form == "unit":
        return m.value(HIDDEN, f"{h} / ({h}.pow(2).sum(-1, keepdim=True).sqrt() + 0.1)")
    w = m.parameter(d, about=1.0)
    return m.value(HIDDEN, f"{w} * ({h} * torch.rsqrt({h}.pow(2).mean(-1, keepdim=True) + 1e-3))")


def pointwise(m: Maker) -> str:
    h, k = m.pick(HIDDEN), m.pick(HIDDEN)
    through = m.one(["reshape(-1)", "flatten()", "contiguous()"])  # a view or a copy
    return m.value(HIDDEN, m.one([
        *[f"(lambda y: (y.{through}.mul_(2.0), y)[1])({h} * 1.0)"] * 4,
        f"{h} + {k}", f"{h} - {k}", f"{h} * torch.sigmoid({k})", activation(m, h), activation(m, h),
        f"{h} * 0.5 + 0.1", f"torch.where({h} > {k}, {h}, {k} * 0.5)",
        f"torch.maximum({h}, {k})", f"1.5 - {h}", f"{h} / (1 + {k}.abs())",
        f"torch.softmax({h}, -1)", f"F.log_softmax({h}, -1)", f"{h}.detach() + {k}",
        f"{h} + torch.inference_mode()(torch.tanh)({h})", f"{h} + torch.no_grad()(torch.tanh)({h})",
        f"{h} * (2.0 if type({h}) is torch.Tensor else 0.5)",
        f"{h} * (0.5 if torch.compiler.is_compiling() else 2.0)",
        f"{h} * (2.0 if isinstance({h}.shape[0], int) else 0.5)",
        f"{h} * (2.0 if {h}.is_contiguous() else 0.5) * ({h}.dim_order()[0] + 1)",
        f"{h} * len(str({h}.shape[1]))",
        f"{h} * {h}.detach().abs().mean(-1, keepdim=True)", f"torch.minimum({h}, {k}.tanh())",
    ]))  # fmt: skip


def attributes(m: Maker) -> str:
    h = m.pick(HIDDEN)
    scale, flag, p = (
        m.attribute("scale", 0.5), m.attribute("flag", True), m.attribute("p", 0.0),
    )  # fmt: skip
    return m.value(HIDDEN, m.one([
        f"{h} * {scale}", f"{h} * {scale}", f"{h} if {flag} else -{h}",
        f"F.dropout({h}, {p}, self.training)", f"F.dropout({h}, {p}, self.training)",
        f"{m.module('nn.Dropout(0.0)')}({h})", f"{h} * (2.0 if self.training else 1.0)",
        f"{h} + {m.attribute('sizes', [1, 2])}[0]",
        f"{h} * {m.attribute('settings', {'gain': 2.0})}['gain']",
        f"{m.module(m.one(['nn.GELU()', 'nn.Tanh()', 'nn.Identity()']))}({h})",
    ]))  # fmt: skip


def masked(m: Maker) -> str:
    h, k, w = m.pick(HIDDEN), m.pick(HIDDEN), m.pick(MASK)
    wide = m.one([f"{w}[..., None]", f"{w}.unsqueeze(-1)", f"{w}[:, :, None].expand_as({h})"])
    return m.value(HIDDEN, m.one([
        f"{h} * {wide}.to({h}.dtype)", f"{h} * {wide}", f"{h}.masked_fill(~{wide}, 0.0)",
        f"{h}.masked_fill({wide}, 0.25)", f"torch.where({wide}, {h}, {k})",
        f"torch.where({wide}, {h}, 0.0)", f"torch.where(~{wide}, 0.5, {h})",
        f"{h} * (1 - {wide}.to({h}.dtype))", f"{h} + {k} * {wide}.to({h}.dtype)",
        f"{h} / {wide}.to({h}.dtype).sum(1, keepdim=True).clamp(min=1)",
        f"torch.where({wide}, {h}, {m.parameter(m.width)})",
    ]))  # fmt: skip


def rows(m: Maker) -> str:
    """A value whose rows are moved: slices, shifts, gathers, joins."""
    h, k = m.pick(HIDDEN), m.pick(HIDDEN)
    form = m.dice.randrange(15)
    if form == 0:
        return m.value(HIDDEN, f"F.pad({h}, (0, 0, -1, 1))")
    if form == 1:
        return m.value(HIDDEN, f"F.pad({h}[:, :-1], (0, 0, 1, 0))")
    if form == 2:
        return m.value(HIDDEN, f"torch.cat([{h}[:, 1:], {k}[:, :1]], 1)")
    if form == 3:
        ids = m.input("ids")
        index = f"({ids} % {h}.shape[1]).long()"
        return m.value(HIDDEN, f"torch.gather({h}, 1, {index}[..., None].expand_as({h}))")
    if form == 4:
        return m.value(HIDDEN, f"{h}[:, torch.arange({h}.shape[1] - 1, -1, -1)]")
    if form == 5:
        return m.value(HIDDEN, f"torch.cat([{h}, {k}], 1)[:, {h}.shape[1]:]")
    if form == 6:
        return m.value(HIDDEN, f"torch.cat([{h}, {k}], 0)[:{h}.shape[0]]")
    if form == 7:
        return m.value(HIDDEN, f"{h}.cumsum(1) / 4")
    if form == 8:
        n = f"{h}.shape[1]"
        ones = f"torch.ones({n}, {n}, dtype={h}.dtype).{m.one(['tril', 'triu'])}()"
        return m.value(HIDDEN, f"({ones} / {n}) @ {h}")
    if form == 9:
        lines = f"t = {h}.clone()\nt[:, 0] = {m.one(['0.0', f'{k}[:, -1]', '1.0'])}\n= t"
        return m.value(HIDDEN, lines)
    if form == 10:
        return m.value(HIDDEN, f"({h} @ {k}.transpose(1, 2)).softmax(-1) @ {h}")
    if form == 11:
        return m.value(HIDDEN, f"torch.stack([{h}, {k}], 2)[:, :, {m.one([0, 1])}]")
    if form == 12:
        return m.value(HIDDEN, f"torch.stack([{h}, {k}], 0).{m.one(['mean', 'sum'])}(0)")
    if form == 13:
        return m.value(HIDDEN, f"{h} + {h}[:, :1] - {k}[:, -1:]")
    ids = m.input("ids")
    return m.value(HIDDEN, f"{h} + F.embedding({ids}, {m.parameter(m.vocabulary, m.width)})")


def reduced(m: Maker) -> str:
    """A reduction, broadcast back to all rows."""
    h, how = m.pick(HIDDEN), m.one(["mean", "mean", "sum", "amax", "amin"])
    dim = m.one(["-1", "-1", "1", "1", "0", "(0, 1)", "(1, 2)"])
    form = m.one([f"{h} - {{}} * 0.25", f"{h} + {{}} * 0.25", f"{{}}.expand_as({h}) * 0.5"])
    return m.value(HIDDEN, form.format(f"{h}.{how}({dim}, keepdim=True)"))


def shaped(m: Maker) -> str:
    h, d = m.pick(HIDDEN), m.width
    half = d // 2
    shape = f"{h}.shape[0], {h}.shape[1]"
    return m.value(HIDDEN, m.one([
        f"{h}.reshape(-1, {d}).view({shape}, {d})",
        f"{h}.transpose(1, 2).contiguous().transpose(1, 2)",
        f"{h}.view({shape}, 2, {half}).transpose(2, 3).reshape({shape}, {d})",
        f"{h}.view({shape}, 2, {half}).transpose(1, 2).transpose(1, 2).flatten(2)",
        f"torch.cat({h}.chunk(2, -1)[::-1], -1)",
        f"torch.cat([-{h}[..., {half}:], {h}[..., :{half}]], -1)",
        f"torch.cat({h}.split([1, {d - 1}], -1)[::-1], -1)",
        f"{h}.chunk(2, -1)[0].repeat(1, 1, 2)",
        f"({h}.chunk(2, -1)[0] * {h}.chunk(2, -1)[1].sigmoid()).repeat_interleave(2, -1)",
        f"torch.stack({h}.unbind(-1)[::-1], -1)",
        f"{h}.permute(0, 2, 1).softmax(-1).permute(0, 2, 1)",
        f"{h}.flatten(0, 1).unflatten(0, ({shape}))",
        f"torch.softmax({h}, 1)",
        f"torch.einsum('btd,de->bte', {h}, {m.parameter(d, d)})",
        f"F.pad({h}, (0, 1)).narrow(-1, 1, {d})",
        f"{h}[..., None].squeeze(-1)",
        f"{h}[..., ::2].repeat(1, 1, 2)",
    ]))  # fmt: skip


def joined(m: Maker) -> str:
    h, k, d = m.pick(HIDDEN), m.pick(HIDDEN), m.width
    return m.value(HIDDEN, linear_code(m, f"torch.cat([{h}, {k}], -1)", 2 * d, d))


def gated(m: Maker) -> str:
    h, d = m.pick(HIDDEN), m.width
    both = linear_code(m, h, d, 2 * d)
    gate = m.one(["torch.sigmoid", "F.silu", "F.gelu"])
    return m.value(HIDDEN, f"a, b = ({both}).chunk(2, -1)\n= a * {gate}(b)")


def spread(m: Maker) -> str:
    h, p = m.pick(HIDDEN), m.pick(POOLED)
    return m.value(HIDDEN, m.one([
        f"{h} + {p}[:, None]", f"{h} * torch.sigmoid({p}).unsqueeze(1)",
        f"torch.cat([{p}[:, None], {h}[:, 1:]], 1)", f"{p}[:, None].expand_as({h})",
    ]))  # fmt: skip


def encoder_layer(m: Maker) -> str:
    h, d, k = m.pick(HIDDEN), m.width, m.pick(MASK)
    if m.chance(0.5):
        first = m.one(["True", "False"])
        inner = m.module(
            f"nn.TransformerEncoderLayer({d}, 2, {2 * d}, dropout=0.0, batch_first=True, "
            f"norm_first={first})"
        )
        return m.value(HIDDEN, f"{inner}({h}, src_key_padding_mask=~{k})")
    if m.chance(0.4):
        last = m.one(["None", f"nn.LayerNorm({d})"])
        inner = m.module(
            f"nn.TransformerEncoder(nn.TransformerEncoderLayer({d}, 2, {d}, dropout=0.0, "
            f"batch_first=True), 1, norm={last})"
        )
        hidden = m.one([f"~{k}", f"(~{k}).to({h}.dtype) * -1e9"])
        return m.value(HIDDEN, f"{inner}({h}, src_key_padding_mask={hidden})")
    inner = m.module(f"nn.MultiheadAttention({d}, 2, batch_first=True)")
    return m.value(HIDDEN, f"{inner}({h}, {h}, {h}, key_padding_mask=~{k}, need_weights=False)[0]")


# ---- attention


def attention(m: Maker) -> str:
    h = m.pick(HIDDEN)
    k = h if m.chance(0.75) else m.pick(HIDDEN)
    d, heads = m.width, m.one([1, 2])
    size = d // heads
    lines = []
    if k == h and m.chance(0.45):
        lines.append(
            f"q, k, v = ({linear_code(m, h, d, 3 * d)})"
            f".{m.one(['chunk(3, -1)', f'split({d}, -1)'])}"
        )
    else:
        for name, of in (("q", h), ("k", k), ("v", k)):
            lines.append(f"{name} = {linear_code(m, of, d, d)}")
    split = not (heads == 1 and m.chance(0.4))
    if split:
        shape = m.one([f"q.shape[0], -1, {heads}, {size}", f"*{h}.shape[:2], {heads}, {size}"])
        lines.append(f"q, k, v = (t.view({shape}).transpose(1, 2) for t in (q, k, v))")
    lines += _scores(m, h, size, heads, split)
    if split:
        lines.append(m.one([
            f"t = t.transpose(1, 2).reshape({h}.shape)",
            "t = t.transpose(1, 2).flatten(2)",
            f"t = t.permute(0, 2, 1, 3).contiguous().view(*{h}.shape[:2], {d})",
        ]))  # fmt: skip
    if m.chance(0.5):
        lines.append(f"t = {linear_code(m, 't', d, d)}")
    return m.value(HIDDEN, "\n".join([*lines, f"= {h} + t" if m.chance(0.5) else "= t"]))


def _scores(m: Maker, h: str, size: int, heads: int, split: bool) -> list[str]:
    """Code of attention that makes `t` from `q`, `k` and `v` under some mask."""
    axes = "[:, None, None, :]" if split else "[:, None, :]"
    down = "[:, None, :, None]" if split else "[:, :, None]"
    n = f"{h}.shape[1]"
    causal = m.chance(0.3)
    keep = ""  # the text of a bool mask, True where a key is seen
    if m.chance(0.75):
        k = m.pick(MASK)
        keep = f"{k}{axes}"
        if m.chance(0.12):
            keep = f"~{k}{axes}"
        if m.chance(0.2):
            keep = f"({keep} & {k}{down})"
        if m.chance(0.1):
            keep = f"({k}{down} == {k}{axes})"
    triangle = m.one([
        f"torch.ones({n}, {n}, dtype=torch.bool).tril()",
        f"(torch.arange({n})[None] <= torch.arange({n})[:, None])",
        f"(torch.triu(torch.ones({n}, {n}), 1) == 0)",
        f"((torch.arange({n})[:, None] - torch.arange({n})[None]).abs() < 2)",
    ])  # fmt: skip
    both = [keep, triangle] if causal and keep else []
    if causal and keep:
        keep = f"({keep} & {triangle})"
    elif causal:
        keep = triangle
    if m.chance(0.5):
        return _fused(m, keep, n, causal)
    masks = [keep] if keep else []
    if both and m.chance(0.4):  # one after the other
        masks = m.one([both, both[::-1]])
    lines = [f"s = q @ k.transpose(-1, -2) {m.one([f'/ {size} ** 0.5', f'* {size**-0.5!r}', ''])}"]
    if m.chance(0.15):
        table = m.parameter(heads, POSITIONS, POSITIONS)
        table = f"{table}[:, :{n}, :{n}]" if split else f"{table}[0, :{n}, :{n}]"
        lines.append(f"s = s + {table}")
    if m.chance(0.1) and split:
        lines.append(f"s = s + {m.input('bias')}")
    lines += [_hidden(m, seen) for seen in masks]
    lines.append(
        m.one(["a = torch.softmax(s, -1)", "a = F.softmax(s, dim=-1)", "a = s.softmax(-1)"])
    )
    if keep and m.chance(0.15):
        lines.append(f"a = a * ({keep})")
    if keep and m.chance(0.05):
        lines.append(f"a = a.masked_fill(~({keep}), 0.0)")
    if m.chance(0.2):
        lines.append(f"a = F.dropout(a, {m.attribute('p', 0.0)}, self.training)")
    return [*lines, "t = a @ v"]


def _hidden(m: Maker, keep: str) -> str:
    """Code that hides scores `s` where a mask says so: by a number in their place, or added."""
    low = _low(m, "s")
    under = m.one(["-1e4", "-1e9", "torch.finfo(s.dtype).min"])
    return m.one([
        f"s = s.masked_fill(~({keep}), {low})",
        f"s = torch.where({keep}, s, {low})",
        f"s = s + (1.0 - ({keep}).to(s.dtype)) * {under}",
        f"s = s + torch.zeros_like(s).masked_fill(~({keep}), {low})",
        f"s = s.masked_fill(({keep}) == 0, {low})",
        f"s = s.masked_fill(({keep}).logical_not(), {low})",
        f"s = torch.where(~({keep}), {low}, s)",
        f"s = s + torch.where({keep}, 0.0, {low})",
    ])  # fmt: skip


def _low(m: Maker, scores: str) -> str:
    """A number that hides a score."""
    return m.one(["-1e4", f"torch.finfo({scores}.dtype).min", "-1e9"] * 2 + ["float('-inf')"])


def _fused(m: Maker, keep: str, n: str, causal: bool) -> list[str]:
    low, more = _low(m, "q"), ""
    if m.chance(0.2):
        more += f", dropout_p={m.attribute('p', 0.0)} if self.training else 0.0"
    if m.chance(0.2):
        more += ", scale=0.5"
    call = "t = F.scaled_dot_product_attention(q, k, v"
    if causal and m.chance(0.4):
        return [f"{call}, is_causal=True{more})"]
    if not keep:
        return [f"{call}{more})"]
    forms = [
        keep,
        keep,
        f"torch.zeros((), dtype=q.dtype).masked_fill(~({keep}), {low})",
        f"torch.where({keep}, 0.0, {low}).to(q.dtype)",
        f"(1.0 - ({keep}).to(q.dtype)) * {m.one(['-1e4', 'torch.finfo(q.dtype).min'])}",
        f"({keep}).expand(q.shape[0], {'1, ' if keep.count('None, None') else ''}{n}, {n})",
    ]
    return [f"{call}, attn_mask={m.one(forms[:5])}{more})"]


# ---- pooled


def pooled(m: Maker) -> str:
    h, k = m.pick(HIDDEN), m.pick(MASK)
    b = f"torch.arange({h}.shape[0])"
    wide = f"{k}[..., None].to({h}.dtype)"
    score = m.parameter(m.width, 1)
    at = m.input("at") if m.chance(0.15) else ""
    forms = [
        f"{h}[:, 0]", f"{h}[:, 0]", f"{h}[:, -1]", f"{h}.mean(1)", f"{h}.amax(1)",
        f"({h} * {wide}).sum(1) / {wide}.sum(1).clamp(min=1)",
        f"({h} * {wide}).sum(1) / {wide}.sum(1).clamp(min=1)",
        f"{h}.masked_fill(~{k}[..., None], -1e4).amax(1)",
        f"torch.where({k}[..., None], {h}, 0.0).sum(1)",
        f"{h}[{b}, {k}.sum(1).clamp(min=1) - 1]",
        f"{h}[{b}, {k}.long().argmax(1)]",
        f"{h}.gather(1, ({k}.sum(1).clamp(min=1) - 1)[:, None, None]"
        f".expand(-1, 1, {m.width}))[:, 0]",
        f"({h} * ({h} @ {score}).masked_fill(~{k}[..., None], -1e4).softmax(1)).sum(1)",
        f"(({h} @ {score}).squeeze(-1).masked_fill(~{k}, -1e4).softmax(-1)[:, None] @ {h})[:, 0]",
    ]  # fmt: skip
    if at:
        forms = [
            f"{h}[{b}, {at}]",
            f"{h}.gather(1, {at}[:, None, None].expand(-1, 1, {m.width})).squeeze(1)",
        ]
    return m.value(POOLED, m.one(forms))


def from_pooled(m: Maker) -> str:
    p, q, d = m.pick(POOLED), m.pick(POOLED), m.width
    form = m.dice.randrange(4)
    if form == 0:
        return m.value(POOLED, linear_code(m, p, d, d))
    if form == 1:
        return m.value(POOLED, activation(m, p))
    if form == 2:
        return m.value(POOLED, linear_code(m, f"torch.cat([{p}, {q}], -1)", 2 * d, d))
    return m.value(POOLED, m.one([f"{p} + {q}", f"{p} - {q}.mean(0)", f"{p} * {q}.sigmoid()"]))


# ---- losses


def loss(m: Maker) -> str:
    form = m.dice.random()
    if form < 0.5:
        return m.value(LOSS, token_loss(m))
    if form < 0.8:
        return m.value(LOSS, pooled_loss(m))
    h, w = m.pick(HIDDEN), m.pick(MASK)
    wide = f"{w}.to({h}.dtype)"
    return m.value(LOSS, m.one([
        f"{h}.pow(2).mean()", f"({h}.pow(2).mean(-1) * {wide}).sum() / {wide}.sum().clamp(min=1)",
        f"{h}.masked_fill(~{w}[..., None], 0.0).pow(2).sum() / 10",
        f"F.mse_loss({h} * {wide}[..., None], torch.ones_like({h}))",
        f"torch.where({w}, {h}.square().sum(-1), 0.0).mean()",
        f"({h}.tanh().mean(-1) * {wide}).sum(1).div({wide}.sum(1).clamp(min=1)).mean()",
        f"F.mse_loss({h}[:, 0], {h}[:, -1]) + {h}.mean() ** 2",
    ]))  # fmt: skip


def token_loss(m: Maker) -> str:
    h, v, y = m.pick(HIDDEN), m.vocabulary, m.input("labels")
    tables = [p for p in m.parameters if p["shape"] == [v, m.width] and not p["buffer"]]
    head = f"F.linear({h}, `{m.one(tables)['path']}`)" if tables and m.chance(0.3) else ""
    head = head or linear_code(m, h, m.width, v)
    form = m.dice.randrange(8)
    if form < 3:
        smooth = m.one(["", "", ", label_smoothing=0.1", ', reduction="sum"'])
        return f"F.cross_entropy(({head}).view(-1, {v}), {y}.view(-1){smooth})"
    if form == 3:
        return f"F.cross_entropy(({head}).transpose(1, 2), {y})"
    if form == 4:
        cut = f"[:, :-1].reshape(-1, {v})"
        return f"F.cross_entropy(({head}){cut}, {y}[:, 1:].reshape(-1))"
    if form == 5:
        w = m.pick(MASK)
        return f"F.cross_entropy(({head}).flatten(0, 1), {y}.masked_fill(~{w}, -100).flatten())"
    if form == 6:
        w = m.pick(MASK)
        each = f'F.cross_entropy(({head}).view(-1, {v}), {y}.view(-1), reduction="none")'
        return f"({each}.view({y}.shape) * {w}).sum() / {w}.sum().clamp(min=1)"
    gathered = f"F.log_softmax({head}, -1).gather(-1, {y}.clamp(min=0)[..., None]).squeeze(-1)"
    return f"-({gathered} * ({y} != -100)).sum() / ({y} != -100).sum()"


def pooled_loss(m: Maker) -> str:
    p = m.pick(POOLED)
    form = m.dice.randrange(5)
    if form < 2:
        return f"F.cross_entropy({linear_code(m, p, m.width, 3)}, {m.input('classes')})"
    if form == 2:
        return f"F.mse_loss({p}, {m.input('target')})"
    if form == 3:
        return (
            f"F.binary_cross_entropy_with_logits({p}[:, 0], {m.input('classes')}.to({p}.dtype) / 2)"
        )
    return f"F.mse_loss({p}, {m.input('target')}, reduction='sum') + {p}.pow(2).mean()"


GRAMMAR: dict[Callable[[Maker], str], float] = {
    linear: 2, feed_forward: 1.5, norm: 2, pointwise: 2, attributes: 0.7, masked: 2, rows: 2,
    reduced: 1, shaped: 1.5, joined: 0.7, gated: 0.5, spread: 0.7, attention: 4, positions: 1,
    encoder_layer: 0.35, mask: 1, pooled: 1, from_pooled: 0.7,
}  # fmt: skip


Maker.beginnings.update({HIDDEN: first, POOLED: pooled, MASK: mask})


def program(m: Maker) -> dict[str, Any]:
    """The module's part of a case."""
    first(m)
    rules, weights = list(GRAMMAR), list(GRAMMAR.values())
    for _ in range(m.dice.randint(1, 6)):
        m.dice.choices(rules, weights)[0](m)
    unusual(m)
    written_out(m)
    perhaps_complex(m)
    if m.chance(0.1):
        m.pick(HIDDEN)
        m.parameter(3, m.width)  # nobody reads it
    end = loss(m)
    if m.chance(0.15):
        end = m.value(LOSS, f"{end} + 0.5 * {loss(m)}")
    if m.rarely(0.1):
        end = loss_in_parts(m, linear_code(m, m.pick(HIDDEN), m.width, m.vocabulary))
    if m.rarely(0.08):  # without dims
        end = m.value(LOSS, f"{end} * {m.parameter(about=1.0)}")
    if m.rarely(0.04):  # without elements
        end = m.value(LOSS, f"{end} + {m.parameter(0, m.width)}.sum()")
    if m.rarely(0.05) and m.parameters:  # an attribute of a parameter, which it may not have
        path = m.late(m.parameters)["path"]
        end = m.value(LOSS, f"{end} * getattr(`{path}`, 'gain', 1.0)")
    end, stopped = stops(m, end)
    kept = [n for n, k in m.kinds.items() if k in (HIDDEN, POOLED, "wide", LOSS) and n != end]
    outputs: dict[str, str] = {}
    if m.chance(0.6):
        names = [*OUTPUT_NAMES, *(ODD_OUTPUTS if m.odd else [])]
        for name in m.dice.sample(names, min(len(kept), m.dice.randint(0, 3))):
            outputs[name] = m.one(kept)
    aliases = []
    for p in m.parameters:
        if m.chance(0.04):
            aliases.append([f"tied.{p['path'].replace('.', '_')}", p["path"]])
    made = {
        "width": m.width, "parameters": m.parameters, "modules": m.modules, "aliases": aliases,
        "inputs": m.inputs, "attributes": m.attributes, "body": m.body, "loss": end,
        "outputs": outputs, "vocabulary": m.vocabulary, "stopped": stopped,
    }  # fmt: skip
    return clean(made)
