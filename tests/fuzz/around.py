"""What is around a program: wrappers, a base class that saves itself, a collator that draws."""

from __future__ import annotations

import random
from typing import Any

from fuzz.maker import Case, Maker

# `face` is what Onward puts around a model, and nothing on the other sides
WRAPS = (
    "Outer(face(model))", "face(Outer(model))", "face(Outer(face(model)))",
    "Parallel(face(model))", "face(Parallel(model))", "Parallel(Outer(face(model)))",
    "face(face(model))", "Outer(Outer(model))",
)  # fmt: skip
ADAPTED = (
    "face(adapted(model))",
    "Parallel(face(adapted(model)))",
    "face(Parallel(adapted(model)))",
)
COLLATORS = {
    "ids": (
        "torch.where(torch.rand(x.shape) < 0.3, 1, x)",
        "torch.where(torch.bernoulli(torch.full(x.shape, 0.3)).bool(), 2, x)",
        "torch.where(torch.rand(x.shape) < 0.5, torch.randint(1, 9, x.shape), x)",
    ),
    "features": ("x + 0.3 * torch.randn(x.shape)", "x * (torch.rand(x.shape) < 0.8)"),
}  # fmt: skip
CLASSES = '''
class Outer(nn.Module):
    """Hands a batch on by its names."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **batch):
        return self.inner(**batch)


class Parallel(nn.Module):
    """Hands everything on, as a wrapper of a distributed run does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)
'''
ADAPT = """
def adapted(model):
    import peft

    torch.manual_seed(2)
    config = peft.LoraConfig(r=2, target_modules={targets!r}, init_lora_weights=False)
    return peft.get_peft_model(model, config)
"""
PRETRAINED = """
import transformers


class CaseConfig(transformers.PretrainedConfig):
    model_type = "case"
"""


def perhaps_around(m: Maker, case: Case) -> None:
    """Draws `wrap`, `base` and `collator` of a case, and what they add to its history."""
    dice = random.Random(f"{m.seed} around")
    case |= {"wrap": "", "base": "", "collator": {}, "face": "accelerate", "seeded": True}
    linear = [x["path"] for x in case["modules"] if x["code"].startswith("nn.Linear(")]
    if dice.random() < 0.12 and not m.odd:
        case["wrap"] = dice.choice(ADAPTED if linear and dice.random() < 0.5 else WRAPS)
        case["face"] = dice.choice(["Module", "Module", "accelerate"])
        if "adapted" in case["wrap"]:
            case["targets"] = linear
            case["history"] = [
                a for a in case["history"] if not any(p in a.get("code", "") for p in linear)
            ]
    plain = not (m.odd or m.strided or case["aliases"] or case["wrap"])
    if plain and dice.random() < 0.1:
        case["base"] = "pretrained"
    drawn = [kind for kind in COLLATORS if kind in case["inputs"]]
    if drawn and dice.random() < 0.2:
        kind = dice.choice(drawn)
        code = dice.choice(COLLATORS[kind])
        case["collator"] = {"input": case["inputs"][kind]["name"], "code": code}
    case["seeded"] = dice.random() < 0.5
    _more(dice, case)


def _more(dice: random.Random, case: Case) -> None:
    """Saving and evaluation in between, parameters that are trained by turns, a last step."""
    train = [a for a in case["history"] if a["do"] == "train" and "spoil" not in a]
    if not train or case["options"]["gradient_accumulation_steps"] > 1:
        return
    more: list[dict[str, Any]] = []
    again = {"do": "train", "batch": train[-1]["batch"]}
    if dice.random() < (0.6 if case["base"] else 0.06):
        for _ in range(dice.choice([1, 2])):
            more += [{"do": "save"}, again]
            if dice.random() < 0.5:
                more += [{"do": "eval", "batch": again["batch"]}, again]
    held = [p["path"] for p in case["parameters"] if not p["buffer"] and not p["frozen"]]
    if held and dice.random() < 0.06:
        p = f"model.get_parameter({dice.choice(held)!r})"
        for _ in range(2):
            more += [{"do": "code", "code": f"{p}.requires_grad_(False)"}, again]
            more += [{"do": "code", "code": f"{p}.requires_grad_(True)"}, again]
    case["history"] = case["history"] + more


def around_source(case: Case) -> str:
    """The functions `around(model, face)` and `collated(batch)`."""
    lines = []
    if case["wrap"]:
        lines.append(CLASSES)
    if "adapted" in case["wrap"]:
        lines.append(ADAPT.format(targets=case["targets"]))
    lines.append(f"def around(model, face):\n    return {case['wrap'] or 'face(model)'}\n")
    text = "batch"
    if case["collator"]:
        name, code = case["collator"]["input"], case["collator"]["code"]
        lines.append(f"def drawn(x):\n    return ({code}).to(x.dtype)\n")
        text = f"batch | ({{{name!r}: drawn(batch[{name!r}])}} if {name!r} in batch else {{}})"
    lines.append(f"def collated(batch):\n    return {text}\n")
    return "\n\n".join(lines)
