"""A case as Python: what runs is what is printed."""

from __future__ import annotations

import re
from typing import Any

from fuzz.around import PRETRAINED, around_source
from fuzz.maker import Case
from fuzz.regions import classes

# the keys of a variant that are options of the Trainer
OPTIONS = ("disable", "memory_budget", "mixed_precision", "loss_scale")

PRELUDE = '''
def tensor(*shape, seed, about=0.0, layout="rows"):
    """Random numbers, laid out in memory one way or another."""
    x = about + 0.4 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if layout == "columns":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "slice":
        return torch.cat([x, x], -1)[..., : shape[-1]]
    if layout == "offset":
        return torch.cat([x, x])[shape[0] :]
    if layout == "step":
        return torch.stack([x, x], -1)[..., 0]
    return x


def aliased(batch, name, model, path):
    """The batch, in which an input is a view of the rows of a parameter."""
    return batch | {name: model.get_parameter(path).detach()[: batch[name].shape[1]]
                    .expand(batch[name].shape)}


def put(root, path, x):
    """`root.<path> = x`, with the modules on the way."""
    *owners, name = path.split(".")
    for owner in owners:
        if owner not in root._modules:
            root.add_module(owner, nn.Module())
        root = root._modules[owner]
    if isinstance(x, nn.Parameter):
        root.register_parameter(name, x)
    else:
        root.register_buffer(name, x)
'''


def number(text: str) -> int:
    """A seed that depends on nothing but the text."""
    value = 7
    for c in text:
        value = (value * 31 + ord(c)) % 1_000_003
    return value


def expression(case: Case, text: str) -> str:
    """A statement's code with the names of inputs and parameters filled in."""
    for kind, item in case["inputs"].items():
        text = text.replace(f"${kind}$", item["name"])
    kinds = {p["path"]: p["buffer"] for p in case["parameters"]}

    def access(found: re.Match[str]) -> str:
        path = found[1]
        if all(part.isidentifier() for part in path.split(".")):
            return f"self.{path}"
        return f"self.get_{'buffer' if kinds[path] else 'parameter'}({path!r})"

    return re.sub(r"`([^`]+)`", access, text)


def statement(case: Case, item: dict[str, Any]) -> list[str]:
    lines = expression(case, item["code"]).split("\n")
    last = lines[-1]
    lines[-1] = f"{item['to']} {last}" if last.startswith("= ") else f"{item['to']} = {last}"
    return lines


def model_source(case: Case) -> str:
    """The class `Model`."""
    out = ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    if case["base"]:
        out[0] = "class Model(transformers.PreTrainedModel):\n    config_class = CaseConfig\n"
        out[2] = "        super().__init__(CaseConfig())"
    if "config" in case["attributes"] and not case["base"]:
        out.append("        self.config = types.SimpleNamespace(problem_type=None)")
    if case["modules"]:
        out.append("        torch.manual_seed(1)")
    out += [f"        self.{k} = {v!r}" for k, v in case["attributes"].items() if k != "config"]
    out += [f"        self.{x['path']} = {x['code']}" for x in case["modules"]]
    for p in case["parameters"]:
        about = f", about={p['about']}" if p["about"] else ""
        layout = f", layout={p['layout']!r}" if p["layout"] != "rows" else ""
        sizes = "".join(f"{n}, " for n in p["shape"])
        x = f"tensor({sizes}seed={number(p['path'])}{about}{layout})"
        if not p["buffer"]:
            x = f"nn.Parameter({x}{', requires_grad=False' if p['frozen'] else ''})"
        out.append(f"        put(self, {p['path']!r}, {x})")
    buffers = {p["path"] for p in case["parameters"] if p["buffer"]}
    out += [
        f"        put(self, {n!r}, self.get_{'buffer' if old in buffers else 'parameter'}({old!r}))"
        for n, old in case["aliases"]
    ]
    arguments = ", ".join(["self", *(v["name"] for v in case["inputs"].values())])
    out += ["", f"    def forward({arguments}):"]
    end = case.get("returned")
    for item in case["body"]:
        out += [f"        {line}" for line in statement(case, item)]
    own = (case["returned_as"], end) if case.get("returned_as") else ("loss", case["loss"])
    if case["loss_fn"] and not case.get("returned_as"):
        out.append(f"        return {end}")
    elif case["outputs"] or case.get("returned_as"):
        pairs = [own, *case["outputs"].items()]
        out.append(f"        return {{{', '.join(f'{k!r}: {v}' for k, v in pairs)}}}")
    else:
        out.append(f"        return {case['loss']}")
    return "\n".join(out) + "\n"


def batch_source(case: Case, spec: dict[str, Any], spoil: str = "") -> str:
    """A dictionary of tensors. Each input has a random stream of its own."""
    import random

    size, length, vocabulary = spec["size"], spec["length"], case["vocabulary"]
    dice = random.Random(spec["seed"])
    keep = mask_of(spec)
    parts: dict[str, str] = {}
    for kind, item in case["inputs"].items():
        dice = random.Random(f"{spec['seed']} {kind}")
        if kind == "ids":
            rows = [[dice.randrange(1, vocabulary) if k else 0 for k in row] for row in keep]
            if spoil == "ids":
                rows[-1][-1] = dice.choice([vocabulary, vocabulary + 1000, -1])
            text = f"torch.tensor({rows}, dtype=torch.{item['dtype']})"
        elif kind == "mask":
            text = f"torch.tensor({keep}).to(torch.{item['dtype']})"
        elif kind == "lengths":
            text = f"torch.tensor({[max(1, sum(r)) for r in keep]}, dtype=torch.{item['dtype']})"
        elif kind == "labels":
            text = f"torch.tensor({labels_of(spec, vocabulary, keep, spoil)})"
        elif kind == "classes":
            found = [dice.randrange(3) for _ in range(size)]
            if spoil == "labels":
                found[0] = 7
            text = f"torch.tensor({found})"
        elif kind == "at":
            text = f"torch.tensor({[dice.randrange(length) for _ in range(size)]})"
        else:
            shape = {
                "features": (size, length, case["width"]), "target": (size, case["width"]),
                "bias": (size, 1, length, length),
            }[kind]  # fmt: skip
            text = f"tensor({', '.join(map(str, shape))}, seed={dice.randrange(10_000)})"
        if item["layout"] == "columns" and kind not in ("lengths", "classes", "at"):
            text += ".transpose(0, 1).contiguous().transpose(0, 1)"
        parts[item["name"]] = text
    first = next(iter(parts), "")
    if case["loss_fn"]:
        parts["labels"] = f"torch.tensor({labels_of(spec, 4, keep, spoil)}).clamp(min=0)"
    if spoil == "shape" and first:
        parts[first] += "[:, :-1]" if first != "lengths" else "[:-1]"
    if spoil == "rank" and first:
        parts[first] += "[None]"
    if spoil == "missing" and first:
        del parts[first]
    if spoil == "more":
        parts["more"] = "torch.zeros(1)"
    return "{\n" + "".join(f"    {k!r}: {v},\n" for k, v in parts.items()) + "}"


def mask_of(spec: dict[str, Any]) -> list[list[int]]:
    """An attention mask of B rows; at least one row ends in a real token, as a collator pads."""
    import random

    dice, size, length = random.Random(spec["seed"]), spec["size"], spec["length"]
    form = spec["padding"]
    rows = []
    for b in range(size):
        n = length if b == 0 or form == "full" else dice.randint(1, length)
        if form == "one":
            n = 1 if b else length
        row = [1] * n + [0] * (length - n)
        if form == "left":
            row.reverse()
        elif form == "holes":
            dice.shuffle(row)
        rows.append(row)
    return rows


def labels_of(
    spec: dict[str, Any], vocabulary: int, keep: list[list[int]], spoil: str
) -> list[list[int]]:
    import random

    dice = random.Random(f"{spec['seed']} labels")
    found = [
        [
            dice.randrange(vocabulary) if k and dice.random() < spec["labelled"] else -100
            for k in row
        ]
        for row in keep
    ]
    if all(y == -100 for row in found for y in row[1:]):
        found[0][-1] = dice.randrange(vocabulary)
    if spoil == "labels":
        found[0][-1] = vocabulary + 3
    return found


def optimizer_source(case: Case) -> str:
    """The function `optimizer_of(model)`."""
    said = case["optimizer"]
    settings = ", ".join(
        f"{k}={tuple(v) if isinstance(v, list) else v!r}" for k, v in said["settings"].items()
    )
    kept = "list(model.parameters())"
    if not said["frozen_too"]:
        kept = "[p for p in model.parameters() if p.requires_grad]"
    lines = ["def optimizer_of(model):", f"    kept = {kept}"]
    if said["reverse"]:
        lines.append("    kept.reverse()")
    if said["without"]:
        lines.append("    kept = kept[:1] + kept[2:]")
    groups = "kept"
    if said["groups"] == 2:
        groups = '[{"params": kept[::2]}, {"params": kept[1::2], "lr": 0.02, "weight_decay": 0.0}]'
        groups = f"{groups} if len(kept) > 1 else kept"
    lines.append(f"    return torch.optim.{said['kind']}({groups}, {settings})")
    return "\n".join(lines) + "\n"


SCHEDULER = "torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)"


def batches_source(case: Case) -> str:
    """The batches by name, spoilt ones as well."""
    out = [f"batch_{i} = {batch_source(case, spec)}" for i, spec in enumerate(case["batches"])]
    for action in case["history"]:
        if action.get("spoil"):
            i = action["batch"]
            name = f"{action['spoil']}_{i}"
            text = f"{name} = {batch_source(case, case['batches'][i], action['spoil'])}"
            if text not in out:
                out.append(text)
    return "\n".join(out) + "\n"


def batch_name(action: dict[str, Any]) -> str:
    return (
        f"{action['spoil']}_{action['batch']}"
        if action.get("spoil")
        else f"batch_{action['batch']}"
    )


def history_source(case: Case) -> str:
    out = ["def history(side):"]
    for action in case["history"]:
        if action["do"] in ("train", "eval"):
            batch = batch_name(action)
            if "alias" in action:
                batch = f"aliased({batch}, {action['input']!r}, side.model, {action['alias']!r})"
            elif action["do"] == "train":
                batch = f"collated({batch})"
            out.append(f"    side.{action['do']}_step({batch})")
        elif action["do"] == "code":
            code = re.sub(r"\b(model|optimizer|scheduler)\b", r"side.\1", action["code"])
            out.append(f"    {code}")
        else:
            out.append(f"    side.{action['do']}()")
    return "\n".join(out) + "\n"


IMPORTS = (
    "import copy\nimport tempfile\nimport types\n\nimport torch\n"
    "import torch.nn.functional as F\nfrom torch import nn\n"
)


def definitions(case: Case) -> str:
    """Everything that the engines run; no more than torch is needed."""
    return "\n\n".join([
        IMPORTS + (PRETRAINED if case["base"] else "") + PRELUDE + classes(case),
        model_source(case), around_source(case), optimizer_source(case), batches_source(case),
        f"loss_fn = {case['loss_fn'] or None}\n",
    ])  # fmt: skip


def script(case: Case, variant: dict[str, Any], title: str) -> str:
    """A stand-alone program that runs eager and Onward and prints how far apart they are."""
    options = {k: v for k, v in case["options"].items() if v not in (None, 1)}
    options |= {"seed": 3} if case["seeded"] else {}
    options |= {k: v for k, v in variant.items() if k in OPTIONS}
    if case["fetch"]:
        options["fetch"] = tuple(case["fetch"])
    made = ", ".join(f"{k}={tuple(v) if isinstance(v, list) else v!r}" for k, v in options.items())
    environment = ""
    if "native" in variant:
        environment = f"import os\n\nos.environ['ONWARD_NATIVE'] = {variant['native']!r}\n"
    scheduler = SCHEDULER.replace("optimizer,", "self.optimizer,") if case["scheduler"] else "None"
    ours = TRAINER.format(options=made, fetch=tuple(case["fetch"]))
    if variant.get("loop") == "module":
        ours = ACCELERATED.format(disable=tuple(variant.get("disable", ())), face=case["face"])
    if variant.get("loop") == "compiled":
        ours = COMPILED
    return SCRIPT.format(
        ours=ours, title=title.replace('"""', "'''"), environment=environment,
        definitions=definitions(case), history=history_source(case), scheduler=scheduler,
        window=case["options"]["gradient_accumulation_steps"],
        clip=case["options"]["max_grad_norm"], fetch=tuple(case["fetch"]),
    )  # fmt: skip


SCRIPT = '''"""{title}"""
{environment}
{definitions}

{history}

class Eager:
    def __init__(self, dtype=torch.float32):
        self.model, self.dtype, self.said, self.micro = Model().train().to(dtype), dtype, [], 0
        self.whole = around(self.model, self.face)
        self.optimizer = optimizer_of(self.whole)
        self.scheduler = {scheduler}

    def face(self, model):
        return model

    def loss(self, batch):
        batch = {{k: v.to(self.dtype) if v.is_floating_point() else v for k, v in batch.items()}}
        if loss_fn:
            y = batch.pop("labels")
            out = self.whole(**batch)
            return loss_fn(out, y), out if isinstance(out, dict) else {{}}
        out = self.whole(**batch)
        return (out, {{}}) if isinstance(out, torch.Tensor) else (out.pop("loss"), out)

    def train_step(self, batch):
        self.whole.train()
        try:
            if self.micro == 0:
                self.optimizer.zero_grad()
            loss, outputs = self.loss(batch)
            (loss / {window}).backward()
        except Exception as error:
            return self.said.append(repr(error))
        self.micro = (self.micro + 1) % {window}
        if self.micro == 0:
            if {clip}:
                kept = [p for g in self.optimizer.param_groups for p in g["params"]]
                nn.utils.clip_grad_norm_(kept, {clip} or 0)
            self.optimizer.step()
        self.said.append((loss.item(), [outputs[n].tolist() for n in {fetch}]))

    def eval_step(self, batch):
        with torch.no_grad():
            self.whole.eval()
            self.said.append(self.loss(batch)[0].item())
            self.whole.train()

    def reload(self): ...

    rebirth = reload

    def save(self):
        if hasattr(self.model, "save_pretrained"):
            self.model.save_pretrained(tempfile.mkdtemp())


{ours}

if __name__ == "__main__":
    sides = Eager(), Eager(torch.float64), Onward()
    for side in sides:
        torch.manual_seed(0)
        history(side)
        print(type(side).__name__, "generator", hash(torch.get_rng_state().numpy().tobytes()))
    for said in zip(*(side.said for side in sides)):
        print("eager ", said[0], "\\nfp64  ", said[1], "\\nonward", said[2])
    for (name, p), q, r in zip(*(side.whole.named_parameters() for side in sides)):
        print(name, "eager", (p - q[1]).norm().item(), "onward", (r[1] - q[1]).norm().item())
'''

ACCELERATED = """class Onward(Eager):
    def face(self, model):
        import onward

        return onward.{face}(model, disable={disable})
"""

COMPILED = """class Onward(Eager):
    def __init__(self):
        super().__init__()
        self.whole = torch.compile(self.whole, backend="onward")
"""

TRAINER = """class Onward(Eager):
    def __init__(self):
        import onward

        super().__init__()
        self.make = lambda: onward.Trainer(
            self.whole, self.optimizer, loss_fn, options=onward.TrainerOptions({options})
        )
        self.trainer = self.make()

    def train_step(self, batch):
        try:
            found = self.trainer.train_step(**batch)
            outputs = [found.outputs[n].tolist() for n in {fetch}]
            self.said.append((found.loss.item(), outputs))
        except Exception as error:
            self.said.append(repr(error))

    def eval_step(self, batch):
        self.said.append(self.trainer.eval_step(**batch).loss.item())

    def reload(self):
        self.trainer.load_state_dict(self.trainer.state_dict())

    def rebirth(self):
        state = self.trainer.state_dict()
        self.model = Model().train()
        self.whole = around(self.model, self.face)
        self.optimizer = optimizer_of(self.whole)
        self.trainer = self.make()
        self.trainer.load_state_dict(state)
"""
