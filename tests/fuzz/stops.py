"""Where a gradient stops, and the complex numbers that it goes through.

Drawn by dice of their own, so that what few programs have changes no other.
"""

from __future__ import annotations

import random
import re

from fuzz.maker import HIDDEN, LOSS, Maker

OFTEN = 0.2  # of all programs have a gradient that stops
# a value that is read, but for its size or its type; a parameter that is read
READ = re.compile(r"(?<![\w.'\"])([hp]\d+)\b(?!\.(shape|dtype|is_contiguous|dim_order))|`[^`]+`")
STOPS = (
    "{}.detach()", "{}.detach()", "{}.detach()", "{}.detach().clone()",
    "torch.no_grad()(torch.clone)({})", "({} + (0.5 * {}).detach())", "({} - {}.detach() * 0.25)",
    "({} + ({}.tanh() - {}).detach())", "torch.inference_mode()(torch.clone)({}).clone()",
)  # fmt: skip


def stops(m: Maker, end: str) -> tuple[str, bool]:
    """Perhaps writes stops before reads of values and parameters: the loss, with a term that a
    gradient always reaches, and whether any was."""
    dice = random.Random(f"{m.seed} stops")
    if dice.random() >= OFTEN:
        return end, False
    found = False
    for item in m.body:
        code = item["code"]
        if any(text in code for text in ("self._kept", "getattr", ".n ", "no_grad", "inference")):
            continue  # what is set is compared with what is read
        for read in reversed(list(READ.finditer(code))):
            if dice.random() < 0.2:
                form = dice.choice(STOPS)
                if read[0].startswith("`") and dice.random() < 0.1:
                    form = "{}.data"  # of a value it is what torch.export cannot trace
                text = form.replace("{}", read[0])
                code = code[: read.start()] + text + code[read.end() :]
                found = True
        item["code"] = code
    return (_kept(m, end) if found else end), found


def perhaps_complex(m: Maker) -> None:
    """Now and then values, or parameters alone, go through complex numbers."""
    dice = random.Random(f"{m.seed} complex")
    if dice.random() >= 0.06:
        return
    h = dice.choice([n for n, k in m.kinds.items() if k == HIDDEN][-3:])
    half, shape = m.width // 2, f"*{h}.shape[:-1], {m.width // 2}, 2"
    pairs = f"t = torch.view_as_complex({h}.reshape({shape}).contiguous())"
    back = "= torch.view_as_real({}).flatten(-2)"
    form = dice.randrange(8)
    if form == 0:
        angle = f"torch.outer(torch.arange({h}.shape[1]).to({h}.dtype), {m.parameter(half)})"
        lines = [pairs, f"a = {angle}", "f = torch.polar(torch.ones_like(a), a)"]
        m.value(HIDDEN, "\n".join([*lines, back.format("t * f")]))
    elif form == 1:
        a, b = m.parameter(half), m.parameter(half)
        m.value(HIDDEN, f"{pairs}\n{back.format(f't * torch.complex({a}, {b})')}")
    elif form == 2:
        w = m.parameter(m.width, 2)
        filtered = f"torch.fft.fft({h}, dim=-1) * torch.view_as_complex({w})"
        m.value(HIDDEN, f"torch.fft.ifft({filtered}, dim=-1).real")
    elif form == 3:
        m.value(HIDDEN, f"torch.fft.fft(torch.fft.fft({h}, dim=-1), dim=1).real * 0.2")
    elif form == 4:
        w = f"torch.complex({m.parameter(half + 1)}, {m.parameter(half + 1)})"
        m.value(HIDDEN, f"torch.fft.irfft(torch.fft.rfft({h}, dim=-1) * {w}, n={m.width}, dim=-1)")
    elif form == 5:
        w = m.parameter(m.width)
        m.value(HIDDEN, f"torch.complex({h}, {w}.expand_as({h}) + 0.3).abs()")
    elif form == 6:  # the parameters' own path alone is complex
        a, b = m.parameter(m.width, about=0.6), m.parameter(m.width)
        m.value(HIDDEN, f"{h} + (torch.complex({a}, {b}) * torch.complex({b}, {a})).imag")
    else:
        a, b = m.parameter(half), m.parameter(half)
        turned = f"torch.exp(torch.complex({a}, {b}) * 1j)"
        m.value(HIDDEN, f"{pairs}\n{back.format(f't * {turned}')}")


def _kept(m: Maker, end: str) -> str:
    last = m.value(HIDDEN, f"{m.pick(HIDDEN)} * `trained.weight`")
    m.parameters.append({
        "path": "trained.weight", "shape": [m.width], "about": 1.0, "layout": "rows",
        "frozen": False, "buffer": False,
    })  # fmt: skip
    return m.value(LOSS, f"{last}.pow(2).mean() + {end}")
