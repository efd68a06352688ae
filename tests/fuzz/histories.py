"""Batches, options and what happens in a run: the other part of a case.

A batch is sizes, lengths and a seed; `source.py` writes its tensors. A history is a list of
actions: `train` and `eval` on a batch (perhaps a spoilt one), `code` that both sides run on
`model`, `optimizer` and `scheduler`, and saving and loading.
"""

from __future__ import annotations

import random
from typing import Any

from fuzz.around import perhaps_around
from fuzz.cleaned import clean
from fuzz.maker import HIDDEN, LOSS, ODD_OUTPUTS, OUTPUT_NAMES, Case, Maker
from fuzz.program import program
from fuzz.regions import changes, counts, is_odd

SPOILS = ("ids", "labels", "shape", "missing", "rank", "more")
PASSES = (
    "known_conditions", "fuse_composites", "fuse_attention", "constant_folding", "noop",
    "common_subexpression_elimination", "patch_convolution",
    "slices_to_split", "split_first", "reshape_through_transpose", "flash_attention",
    "cross_entropy", "linear_cross_entropy", "layer_norm", "add_layer_norm",
    "dead_code_elimination", "bias_activation",
    "gated_activation", "rotary", "grouped_keys", "rms_norm",
    "linear_cross_entropy_step", "gemm_add", "gemm_bias", "scatter_into", "cancel_casts",
    "fold_casts", "activation_again", "cast_again", "wide_sum",
)  # fmt: skip


def case_of(seed: int) -> Case:
    """The case of a seed."""
    m = Maker(seed)
    made = program(m)
    held = [p for p in made["parameters"] if not (p["frozen"] or p["buffer"])]
    if all(p["shape"][:1] == [3] for p in held):
        made = _trained(m, made)
    case = {"seed": seed, **made}
    case["dropout"] = m.chance(0.08)
    case["loss_fn"] = ""
    _loss_function(m, case)
    case |= clean(case)
    case["call"] = m.one(["mapping", "mapping", "keywords"])
    case["optimizer"] = _optimizer(m, case)
    case["options"] = {
        "gradient_accumulation_steps": m.one([1] * 5 + [2]),
        "max_grad_norm": m.one([None] * 4 + [0.5, 100.0]),
    }
    case["scheduler"] = m.one(["", "", "", "before", "after"])
    case["batches"] = [batch(m) for _ in range(m.one([1, 2, 2, 3]))]
    results = [*case["outputs"], *filter(None, [case.get("returned_as")])]
    case["fetch"] = [n for n in results if m.chance(0.5)]
    case["history"] = history(m, case)
    _on_tensors(m, case)
    perhaps_around(m, case)
    case["variants"] = variants(m)
    if counts(case):  # eager may have called it in what is spoilt; a new model begins at 0
        case["history"] = [a for a in case["history"] if "spoil" not in a and a["do"] != "rebirth"]
    if is_odd(case) and not case["dropout"]:
        case["variants"].insert(0, {"loop": "module"})
    if case["dropout"]:
        case["variants"] = [{}, *(case["variants"] or [{"disable": ["row_demand"]}])]
        case["attributes"] = {k: 0.3 if k == "p" else v for k, v in case["attributes"].items()}
        for x in case["modules"]:
            x["code"] = x["code"].replace("Dropout(0.0)", "Dropout(0.3)").replace("p=0.0", "p=0.3")
    else:
        case["variants"] = [{}, *case["variants"]]
        if not is_odd(case) and m.chance(0.25):
            case["variants"].append({"mixed_precision": "bf16"})
    _loops(m, case)
    return case


def _loops(m: Maker, case: Case) -> None:
    """Other precisions where a gradient stops; the other ways to run a model."""
    dice, loops = random.Random(f"{m.seed} loops"), [v.get("loop") for v in case["variants"]]
    if case["dropout"]:
        return
    mixed = any("mixed_precision" in v for v in case["variants"])
    if case["stopped"] and not is_odd(case):
        if not mixed:
            case["variants"].append({"mixed_precision": "bf16"})
        if dice.random() < 0.5:
            case["variants"].append({"mixed_precision": "fp16", "loss_scale": 64.0})
    if "module" not in loops and dice.random() < (0.7 if case["wrap"] else 0.2):
        case["variants"].append({"loop": "module"})
    if dice.random() < (0.5 if case["base"] or case["collator"] else 0.08):
        case["variants"].append({"loop": "drop-in"})
    # torch.compile, whatever its backend, leaves out the path of nn.TransformerEncoder that drops
    # hidden tokens in evaluation, so that their rows are no zeros there
    drops = "nn.TransformerEncoder(" in repr(case)
    if dice.random() < 0.04 and not drops:
        case["variants"].append({"loop": "compiled"})


def _trained(m: Maker, made: Case) -> Case:
    """The program with a parameter that the loss reaches."""
    last = m.value(HIDDEN, f"{m.pick(HIDDEN)} * `trained.weight`")
    end = m.value(LOSS, f"{last}.pow(2).mean() + {made['loss']}")
    m.parameters.append({
        "path": "trained.weight", "shape": [m.width], "about": 1.0, "layout": "rows",
        "frozen": False, "buffer": False,
    })  # fmt: skip
    return clean(made | {
        "parameters": m.parameters, "modules": m.modules, "inputs": m.inputs, "body": m.body,
        "loss": end,
    })  # fmt: skip


def _loss_function(m: Maker, case: Case) -> None:
    """Now and then the loss is a function of what the module returns, and of a target."""
    if not m.chance(0.12) or "labels" in case["inputs"]:
        return
    hidden = [s["to"] for s in case["body"] if s["kind"] == HIDDEN]
    if not hidden:
        return
    case["inputs"] = {k: v for k, v in case["inputs"].items() if k != "labels"}
    case["loss_fn"] = m.one([
        "lambda out, y: F.cross_entropy(out.flatten(0, 1), y.clamp(max=3).flatten())",
        "lambda out, y: (out.pow(2).mean(-1) * (y != -100)).sum()",
        "lambda out, y: F.cross_entropy(out.transpose(1, 2), y.clamp(max=3))",
    ])  # fmt: skip
    case["returned"] = hidden[-1]
    if case["outputs"] or m.chance(0.5):  # among results that may be called as a step's own are
        names = ["loss", *OUTPUT_NAMES, *ODD_OUTPUTS]
        names = [name for name in names if name not in case["outputs"]]
        own, *others = m.dice.sample(names, m.dice.randint(1, 3))
        case["returned_as"] = own
        case["outputs"] = {**case["outputs"], **{n: m.one(hidden) for n in others}}
        case["loss_fn"] = case["loss_fn"].replace("out.", f"out[{own!r}].")


def _optimizer(m: Maker, case: Case) -> dict[str, Any]:
    kind = m.one(["AdamW", "AdamW", "Adam", "SGD", "SGD"])
    settings: dict[str, Any] = {"lr": m.one([0.1, 0.05, 0.01])}
    if kind == "SGD":
        settings["momentum"] = m.one([0.0, 0.0, 0.9])
        settings["weight_decay"] = m.one([0.0, 0.1])
        if settings["momentum"]:
            settings["nesterov"] = m.chance(0.3)
            settings["dampening"] = 0.0 if settings["nesterov"] else m.one([0.0, 0.3])
    else:
        settings |= {"lr": m.one([0.05, 0.01]), "eps": m.one([1e-2, 1e-3])}
        settings["weight_decay"] = m.one([0.0, 0.1])
        settings["betas"] = m.one([[0.9, 0.999], [0.5, 0.9]])
    return {
        "kind": kind, "settings": settings,
        "groups": m.one([1, 1, 1, 2]), "reverse": m.chance(0.15),
        "without": m.chance(0.07),  # leaves a parameter out
        "frozen_too": m.chance(0.5),  # holds frozen parameters as well
    }  # fmt: skip


def batch(m: Maker) -> dict[str, Any]:
    size, length = m.one([2, 3, 4, 2, 3, 4, 1]), m.one([3, 4, 5, 6, 3, 4, 5, 6, 1, 2])
    form = m.one(["right", "right", "right", "left", "holes", "full", "one"])
    return {
        "seed": m.dice.randrange(10_000), "size": size, "length": length, "padding": form,
        "labelled": m.one([0.5, 0.5, 1.0, 0.2, 0.2]),
    }  # fmt: skip


def lines(m: Maker, case: Case) -> list[str]:
    """What may happen to the model between two steps; both sides run it."""
    real = [p["path"] for p in case["parameters"] if not p["buffer"]]
    # Within a window eager drops what it has summed; a Trainer's sums are its own. A spoilt batch
    # that both take after all, or a step that shrinking leaves out, may put any line there.
    whole = case["options"]["gradient_accumulation_steps"] == 1
    found = [
        "optimizer.param_groups[0]['lr'] *= 0.5",
        "optimizer.param_groups[-1]['weight_decay'] = 0.05",
        "optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))",
        "model.load_state_dict({k: v.clone() * 0.9 for k, v in model.state_dict().items()})",
        "model.eval()",
        "for p in model.parameters(): p.grad = None" if whole else "pass",
        "optimizer.zero_grad()" if whole else "pass",
    ]
    if "AdamW" in case["optimizer"]["kind"]:
        found.append("optimizer.param_groups[0]['betas'] = (0.8, 0.9)")
    for name in case["attributes"]:
        text = {
            "scale": "model.scale = 2.0", "flag": "model.flag = False",
            "sizes": "model.sizes[0] = 3", "settings": "model.settings['gain'] = 0.5",
        }.get(name)  # fmt: skip
        found += [text] * 4 if text else []
    for x in case["modules"]:
        if "lines" in x:
            found += changes(x) * 2
        elif "script(" in x["code"]:
            continue  # a copy of which trains what it is a copy of
        elif "hooked(" in x["code"]:
            found.append(f"model.{x['path']} = copy.deepcopy(model.{x['path']})")
        elif "Linear(" in x["code"] or "Norm(" in x["code"]:
            found.append(f"model.{x['path']}.weight.requires_grad_(False)")
            found.append(f"model.{x['path']} = copy.deepcopy(model.{x['path']})")
            found.append(f"model.{x['path']}.bias = None")
        elif "()" in x["code"]:
            found += [f"model.{x['path']} = nn.Sigmoid()"] * 3
        if "LayerNorm(" in x["code"]:
            found.append(f"model.{x['path']}.eps = 0.5")
    for path in m.dice.sample(real, min(2, len(real))):
        owner, _, leaf = path.rpartition(".")
        p = f"model.get_parameter({path!r})"
        found += [
            f"{p}.requires_grad_(False)",
            f"{p}.requires_grad_(True)",
            f"{p}.data = {p}.data.clone()",
            f"{p}.data = {p}.data.t().contiguous().t()",
            f"{p}.data = {p}.data * 0.5",
            f"{p}.data.mul_(0.5)",
            f"with torch.no_grad(): {p}.add_(0.1)",
            f"model.get_submodule({owner!r}).{leaf} = nn.Parameter({p}.detach().clone())"
            if leaf.isidentifier() else f"{p}.data.mul_(0.9)",
            f"optimizer.state.pop({p}, None)",
            f"optimizer.param_groups[0]['params'] = [q for q in optimizer.param_groups[0]['params']"
            f" if q is not {p}]",
        ]  # fmt: skip
    for b in case["parameters"]:
        if b["buffer"]:
            path = b["path"]
            owner, _, leaf = path.rpartition(".")
            found += [f"model.get_buffer({path!r}).mul_(0.5)"] * 3
            found += [
                f"model.get_submodule({owner!r}).{leaf} = model.get_buffer({path!r}) * 2.0"
            ] * 3
    return found


def history(m: Maker, case: Case) -> list[dict[str, Any]]:
    n = len(case["batches"])
    steps: list[dict[str, Any]] = []
    window = case["options"]["gradient_accumulation_steps"]

    def train(i: int) -> None:
        for k in range(window):
            if k and m.rarely(0.3):
                steps.append({"do": "eval", "batch": (i + k + 1) % n})
            steps.append({"do": "train", "batch": (i + k) % n, **_alias(m, case, (i + k) % n)})

    if m.chance(0.1):
        steps.append({"do": "eval", "batch": 0})
    train(0)
    for i in range(1, n):
        train(i)
    changes = m.one([0, 0, 0, 1, 1, 2, 3])
    for _ in range(changes):
        kind = m.dice.random()
        if kind < 0.62:
            steps.append({"do": "code", "code": m.one(lines(m, case))})
        elif kind < 0.72:
            steps.append({"do": "reload"})
        elif kind < 0.8 and not case["scheduler"] and all(s["do"] != "code" for s in steps):
            steps.append({"do": "rebirth"})
        else:
            steps.append({"do": "train", "batch": m.dice.randrange(n), "spoil": m.one(SPOILS)})
        if case["scheduler"] and m.chance(0.5):
            steps.append({"do": "code", "code": "scheduler.step()"})
        train(m.dice.randrange(n))
    if m.chance(0.4):
        steps.append({"do": "eval", "batch": m.dice.randrange(n)})
    if not changes or m.chance(0.3):
        train(0)
    return steps


def _on_tensors(m: Maker, case: Case) -> None:
    """Attributes of parameters that come, change and go, where a forward reads them; and now and
    then a parameter becomes one of a class of its own."""
    read = [p for p in case["parameters"] if any(
        f"getattr(`{p['path']}`" in s["code"] for s in case["body"]
    )]  # fmt: skip
    marked = m.rarely(0.01)
    if any(s["do"] == "rebirth" for s in case["history"]):
        return  # a new model has none of them
    for p in read or (case["parameters"] if marked else []):
        x = f"model.get_{'buffer' if p['buffer'] else 'parameter'}({p['path']!r})"
        changes = [f"{x}.gain = 0.5", f"{x}.gain = 2.0", f"vars({x}).pop('gain', None)"]
        if marked:
            changes = [f"{x}.__class__ = type('Marked', (type({x}),), {{}})"]
        for code in changes:
            at = m.late(range(len(case["history"]) + 1))
            case["history"].insert(at, {"do": "code", "code": code})
        return


def _alias(m: Maker, case: Case, i: int) -> dict[str, str]:
    """Perhaps a parameter whose rows stand in for the batch's features."""
    features, length = case["inputs"].get("features"), case["batches"][i]["length"]
    paths = [
        p["path"] for p in case["parameters"]
        if not p["buffer"] and p["shape"][1:] == [case["width"]] and p["shape"][0] >= length
    ]  # fmt: skip
    if features is None or not paths or not m.rarely(0.3):
        return {}
    return {"alias": m.late(paths), "input": features["name"]}


def variants(m: Maker) -> list[dict[str, Any]]:
    """What Onward runs besides its default."""
    forms: list[dict[str, Any]] = [
        {"disable": ["row_demand"]}, {"disable": ["row_demand"]},
        {"disable": [m.one(PASSES)]}, {"disable": [m.one(PASSES)]}, {"disable": [m.one(PASSES)]},
        {"native": "0"}, {"native": "0"}, {"native": "plain"},
        {"memory_budget": m.one([0.95, 0.8])}, {"check": True}, {"always": True},
        {"disable": list(m.dice.sample(PASSES, 4))},
    ]  # fmt: skip
    return m.dice.sample(forms, m.one([1, 1, 2]))
