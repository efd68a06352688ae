"""Submodules that no graph has a form of: each a class of its own, whose forward is drawn.

Decisions are by numbers that no program meets but by chance: a mean that is 0 but for rounding
would be decided otherwise in another precision.
"""

from __future__ import annotations

import random
from typing import Any

from fuzz.maker import HIDDEN, MASK, Case, Maker

OFTEN = 0.13  # of all programs
CLASSES = '''
class Odd(torch.autograd.Function):
    """Leaves PyTorch, and keeps what it is given in two ways."""

    @staticmethod
    def forward(ctx, x):
        ctx.scale, ctx.x = float(x.detach().numpy().std()), x.detach()
        ctx.save_for_backward(x)
        return x * ctx.scale

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.scale + 0.1 * ctx.x * dy.sum() + 0.1 * ctx.saved_tensors[0]


def hooked(module):
    module.register_forward_hook(lambda m, given, y: y * 0.5 + given[0].mean())
    return module
'''

BARRIERS = (
    "x = x * (0.5 + float(x.detach().numpy().mean() > 0.137))",
    "for _ in range(3):\n    x = torch.tanh(self.lin(x))\n"
    "    if float(x.detach().norm()) < 1.93:\n        break",
    "at = (x.detach().sum(-1) > 0.137).nonzero(as_tuple=True)\n"
    "x = x.index_put(at, self.lin(x[at]))",
    "x = Odd.apply(self.lin(x))",
    "x = x * float(self.lin.weight.detach().numpy().std() + 0.5)",
    "x = self.lin(x) if float(x.detach().abs().max()) > 0.137 else self.other(x)",
)
ORDINARY = (
    "x = self.lin(x)", "x = x + torch.tanh(self.lin(x))", "x = self.drop(x)", "x = x * self.scale",
    "x = torch.special.i1(x)", "x = Odd.apply(x)", "x = x * (1.5 if self.training else 1.0)",
    "x = self.norm(x.flatten(0, 1)).view_as(x)",
    "x = x.transpose(1, 2).contiguous().transpose(1, 2)", "x = x.flip(1) + x[:, :1]",
    "t = torch.no_grad()(self.lin)(x)\nx = x + t",
    "x = torch.utils.checkpoint.checkpoint(self.lin, x, use_reentrant=False)",
    "self.calls += 1\nx = x * (1.0 + 0.1 * self.calls)", "self.kept = x.detach().mean()",
    "if x.requires_grad:\n    x.register_hook(lambda g: g * 0.5)", "x = self.inner(x)",
)  # fmt: skip
# what the part returns, and how the program goes on with it
RETURNS = (
    ("x", "= {}"), ("x", "= {}"), ("x", "= {} + {h}"),
    ("x, x.mean(1)", "a, b = {}\n= a + b[:, None]"),
    ("{'y': x, 'none': None, 'more': [x.sum(-1)]}", "a = {}\n= a['y'] * a['more'][0][..., None]"),
    ("x.flatten(0, 1).contiguous() + 0.0", "= {}.view_as({h})"),
    ("torch.cat([x, x * 0.5], -1)", "= {}.chunk(2, -1)[1] + {h}"),
    ("x, x.detach() > 0.137", "a, b = {}\n= torch.where(b, a, {h})"),
    ("x.sin(), x.cos()", "= {}[0]"), ("x * 1.0, self.lin(x.detach())", "= sum({})"),
)  # fmt: skip


def perhaps_a_region(m: Maker) -> None:
    """Now and then add a region; a separate random stream keeps the programs of all other seeds as
    they were."""
    dice = random.Random(f"{m.seed} regions")
    if dice.random() < OFTEN:
        for _ in range(dice.choice([1, 1, 2])):
            _region(m, dice)


def _region(m: Maker, dice: random.Random) -> None:
    h = dice.choice([n for n, k in m.kinds.items() if k == HIDDEN][-3:])
    form = dice.random()
    if form < 0.1:
        m.value(HIDDEN, f"{h} + 0.1 * torch.special.i1({h})")
        return
    if form < 0.25:
        inner = f"nn.Linear({m.width}, {m.width})"
        wrapped = [f"hooked({inner})", f"torch.jit.script(nn.Sequential({inner}, nn.Tanh()))"]
        m.value(HIDDEN, f"{m.module(dice.choice(wrapped))}({h})")
        return
    lines = [dice.choice(BARRIERS), *dice.sample(ORDINARY, dice.randint(0, 3))]
    dice.shuffle(lines)
    given, masks = h, [n for n, k in m.kinds.items() if k == MASK]
    if masks and dice.random() < 0.3:
        given, lines = f"{h}, {dice.choice(masks)}", ["x = x * y[..., None]", *lines]
    elif dice.random() < 0.2:
        other = dice.choice([n for n, k in m.kinds.items() if k == HIDDEN])
        given, lines = f"{h}, {other}", [*lines, "x = x * torch.sigmoid(y)"]
    returned, read = dice.choice(RETURNS)
    name = f"Part{len(m.modules)}"
    call = f"{m.module(f'{name}({m.width}, p=0.0)')}({given})"
    m.modules[-1] |= {"name": name, "lines": lines, "returns": returned}
    if returned == "x" and dice.random() < 0.15:
        call = call.replace(f"({h}", f"({call}", 1)
    m.value(HIDDEN, read.replace("{}", call).replace("{h}", h))


def classes(case: Case) -> str:
    """The source of what the case's submodules are made of."""
    own = [x for x in case["modules"] if "lines" in x]
    text = "".join([*(x["code"] for x in case["modules"]), *(str(x["lines"]) for x in own)])
    helpers = CLASSES if "Odd" in text or "hooked" in text else ""
    return "\n\n".join([helpers, *map(_class, own)]) if helpers or own else ""


def _class(x: dict[str, Any]) -> str:
    lines = [line for text in x["lines"] for line in text.split("\n")]
    text = "\n".join([*lines, x["returns"]])
    made = [
        f"self.{name} = {code}"
        for name, code in (
            ("lin", "nn.Linear(width, width)"), ("other", "nn.Linear(width, width)"),
            ("norm", "nn.BatchNorm1d(width)"), ("drop", "nn.Dropout(p)"), ("scale", "0.5"),
            ("inner", "nn.Sequential(nn.Linear(width, width), nn.Tanh())"), ("calls", "0"),
            ("kept", "None"),
        )
        if f"self.{name}" in text
    ]  # fmt: skip
    return "\n".join([
        f"class {x['name']}(nn.Module):",
        "    def __init__(self, width, p):",
        "        super().__init__()",
        *(f"        {line}" for line in made),
        "",
        "    def forward(self, x, y=None):",
        *(f"        {line}" for line in lines),
        f"        return {x['returns']}",
        "",
    ])  # fmt: skip


def counts(case: Case) -> bool:
    """Whether the results show how often a part was called, by a counter or a batch norm."""
    texts = [text for x in case["modules"] for text in x.get("lines", ())]
    return any("self.calls" in text or "self.norm" in text for text in texts)


def changes(x: dict[str, Any]) -> list[str]:
    """What may happen to a part between two steps."""
    path, text = f"model.{x['path']}", "\n".join([*x["lines"], x["returns"]])
    found = [f"{path} = copy.deepcopy({path})"]
    if "self.lin" in text:
        found += [
            f"{path}.lin.weight.requires_grad_(False)", f"{path}.lin.bias = None",
            f"{path}.lin = nn.Sequential({path}.lin, nn.Tanh())",
            f"{path}.lin.weight.data = {path}.lin.weight.data * 0.5",
        ]  # fmt: skip
    if "self.lin.weight" in text:
        found = [code for code in found if "nn.Sequential" not in code]
    for name, code in (
        ("scale", "2.0"), ("calls", "5"), ("kept", "None"), ("inner", "nn.Sigmoid()"),
    ):  # fmt: skip
        found += [f"{path}.{name} = {code}"] * 2 if f"self.{name}" in text else []
    if "self.norm" in text:
        found += [f"{path}.norm.eps = 0.5", f"{path}.norm.running_mean.zero_()"]
    return found


def is_odd(case: Case) -> bool:
    """Whether the program has a part that no graph can hold."""
    return bool(classes(case)) or "script(" in str(case["modules"]) or "i1(" in str(case["body"])
