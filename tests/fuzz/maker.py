"""What a program is made with: the dice, the names to draw from, the values made so far.

A case says a module (parameters, statements, outputs), its batches, the options of a run and what
happens in it. Statements are Python text in which a path in backticks stands for a parameter,
`$kind$` for an input of the batch; `source.py` prints the rest around them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

Case = dict[str, Any]
Statement = dict[str, Any]

POSITIONS = 16  # rows of a position table: more than any length
HIDDEN, POOLED, MASK, LOSS = "hidden", "pooled", "mask", "loss"  # f[B,T,D], f[B,D], b[B,T], f[]
PREFIX = {HIDDEN: "h", POOLED: "p", MASK: "m", LOSS: "s"}

INPUT_NAMES = {
    "ids": ["input_ids", "x", "tokens"],
    "features": ["features", "x", "inputs_embeds"],
    "mask": ["attention_mask", "mask", "weight"],
    "lengths": ["lengths", "n"],
    "labels": ["labels", "y", "target"],
    "classes": ["classes", "labels_of_all", "next"],
    "target": ["wanted", "target_values"],
    "bias": ["bias", "relative"],
    "at": ["at", "positions"],
}
INPUT_TYPES = {
    "ids": ["int64"] * 4 + ["int32"],
    "mask": ["int64", "bool", "float32", "int32", "uint8"],
    "labels": ["int64"],
    "lengths": ["int64"] * 3 + ["int32"],
}
# Paths that meet names of the batch, of outputs or of what a training step keeps.
ODD_PATHS = [
    "loss", "seed", "sample_offset", "cotangent.loss", "logits", "input_ids", "labels", "grad_norm",
    "lr.0", "step.0", "rows.R", "exp_avg.w", "grad.w", "next.w", "accumulator.w", "w",
    "param.w", "buffer.w", "batch.x", "output.hidden", "momentum_buffer.w", "model.w", "h1", "B",
    "attention_mask", "layers.0.1.weight", "x", "hidden", "output", "leaves_0", "mask",
]  # fmt: skip
OUTPUT_NAMES = ["hidden", "logits", "pooled", "output", "out_1", "last"]
ODD_OUTPUTS = ["grad_norm", "seed", "input_ids", "w", "next.w", "cotangent.loss", "labels", "h1"]
ACTIVATIONS = [
    "torch.tanh({})", "F.gelu({})", 'F.gelu({}, approximate="tanh")', "F.relu({})", "F.silu({})",
    "torch.sigmoid({})", "torch.sin({})", "{}.abs()", "{}.clamp(-0.5, 0.5)", "torch.exp(-{} ** 2)",
    "{}.square()", "({} * {}.sigmoid())", "0.5 * {} * (1 + torch.tanh({}))", "{}.clamp(min=0)",
    "F.softplus({})", "F.leaky_relu({}, 0.1)", "{}.pow(3)", "F.relu({}).square()",
]  # fmt: skip


class Maker:
    """What is made so far, and the dice. beginnings: what makes the first value of a kind."""

    beginnings: ClassVar[dict[str, Callable[[Maker], str]]] = {}

    def __init__(self, seed: int) -> None:
        self.seed, self.dice = seed, random.Random(seed)
        self._late = random.Random(f"{seed} late")  # so that what is rare changes no other seed
        self.width = self.dice.choice([4, 4, 6, 8])
        self.vocabulary = 11
        self.odd = self.dice.random() < 0.12
        self.strided = self.dice.random() < 0.2
        self.parameters: list[dict[str, Any]] = []
        self.modules: list[dict[str, Any]] = []
        self.inputs: dict[str, dict[str, str]] = {}
        self.attributes: dict[str, Any] = {}
        self.body: list[Statement] = []
        self.kinds: dict[str, str] = {}  # of the values
        self.shapes: dict[str, tuple[int, ...]] = {}

    # ---- dice

    def chance(self, p: float) -> bool:
        return self.dice.random() < p

    def rarely(self, p: float) -> bool:
        return self._late.random() < p

    def late(self, of: Sequence[Any]) -> Any:
        return self._late.choice(of)

    def one(self, of: Sequence[Any]) -> Any:
        return self.dice.choice(of)

    def pick(self, kind: str) -> str:
        """A value of that kind; late ones are likelier."""
        names = [n for n, k in self.kinds.items() if k == kind]
        if not names:
            return self.beginnings[kind](self)
        return names[-1] if self.chance(0.55) else self.one(names)

    # ---- making

    def value(self, kind: str, code: str) -> str:
        """A new value by an expression, or by lines whose last begins with `= `."""
        name = f"{PREFIX[kind]}{len(self.kinds) + 1}"
        self.body.append({"to": name, "kind": kind, "code": code})
        self.kinds[name] = kind
        return name

    def input(self, kind: str) -> str:
        if kind not in self.inputs:
            used = {v["name"] for v in self.inputs.values()}
            names = [n for n in INPUT_NAMES[kind] if n not in used] or [f"{kind}_"]
            self.inputs[kind] = {
                "name": names[0] if self.chance(0.7) else self.one(names),
                "dtype": self.one(INPUT_TYPES.get(kind, [""])),
                "layout": "columns" if self.chance(0.08) else "rows",
            }
        return f"${kind}$"

    def attribute(self, name: str, value: Any) -> str:
        self.attributes.setdefault(name, value)
        return f"self.{name}"

    def parameter(self, *shape: int, about: float = 0.0, leaf: str = "weight") -> str:
        """A new parameter, or now and then one that is there already."""
        same = [p for p in self.parameters if p["shape"] == list(shape) and p["about"] == about]
        if same and self.chance(0.2):
            return f"`{self.one(same)['path']}`"
        taken = {p["path"] for p in self.parameters} | {m["path"] for m in self.modules}
        path = f"block{len(self.parameters) // 3}.part{len(self.parameters)}.{leaf}"
        if self.odd and self.chance(0.6):
            free = [p for p in ODD_PATHS if not any(_meets(p, t) for t in taken)]
            path = self.one(free) if free else path
        layouts = ["rows"]
        if self.strided:
            layouts = ["rows", "columns", "slice", "offset", "step"]
        self.parameters.append({
            "path": path, "shape": list(shape), "about": about,
            "layout": self.one(layouts) if len(shape) > 1 else "rows",
            "frozen": self.chance(0.08),
            "buffer": self.chance(0.03),
        })  # fmt: skip
        return f"`{path}`"

    def module(self, code: str) -> str:
        path = f"part{len(self.modules)}_{len(self.parameters)}"
        self.modules.append({"path": path, "code": code})
        return f"self.{path}"


def _meets(path: str, other: str) -> bool:
    return path == other or path.startswith(f"{other}.") or other.startswith(f"{path}.")
