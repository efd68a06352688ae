"""Makes a failing case small: one deletion after another, each kept where the finding stays."""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

from fuzz.cleaned import clean
from fuzz.judge import Verdict
from fuzz.maker import Case

Judge = Callable[[Case], Verdict]


def shrink(case: Case, verdict: Verdict, judge: Judge, seconds: float = 120.0) -> Case:
    """The smallest case found that shows the same kind of finding."""
    end = time.monotonic() + seconds
    best, again = case, True
    tried = {json.dumps(case, sort_keys=True)}
    while again:
        again = False
        for smaller in candidates(best, verdict):
            key = json.dumps(smaller, sort_keys=True)
            if key in tried:
                continue
            if time.monotonic() > end:
                return best
            tried.add(key)
            found = judge(smaller)
            if same(found, verdict):
                best, verdict, again = smaller, found, True
                break
    return best


def same(found: Verdict, wanted: Verdict) -> bool:
    if found.kind != wanted.kind:
        return False
    return wanted.kind != "exception" or found.signature == wanted.signature


def candidates(case: Case, verdict: Verdict) -> Iterator[Case]:
    """Smaller cases, the largest steps first."""
    if len(case["variants"]) > 1:
        yield case | {"variants": [verdict.variant]}
        yield case | {"variants": [{}, verdict.variant]}
    if len(case["history"]) > verdict.at + 1:
        yield case | {"history": case["history"][: verdict.at + 1]}
    for i in reversed(range(len(case["history"]))):
        yield case | {"history": _without(case["history"], i)}
    for part in ("outputs", "attributes"):
        if part == "outputs":
            for name in case["outputs"]:
                outputs = {k: v for k, v in case["outputs"].items() if k != name}
                fetch = [n for n in case["fetch"] if n != name]
                yield clean(case | {"outputs": outputs, "fetch": fetch})
    for name in case["fetch"]:
        yield case | {"fetch": [n for n in case["fetch"] if n != name]}
    yield from _statements(case)
    plain = {"gradient_accumulation_steps": 1, "max_grad_norm": None}
    for name, value in plain.items():
        if case["options"][name] != value:
            yield case | {"options": case["options"] | {name: value}}
    sgd = {
        "kind": "SGD", "settings": {"lr": 0.1}, "groups": 1, "reverse": False, "without": False,
        "frozen_too": True,
    }  # fmt: skip
    if case["optimizer"] != sgd:
        yield case | {"optimizer": sgd}
        yield case | {"optimizer": case["optimizer"] | {k: sgd[k] for k in list(sgd)[2:]}}
    for name, value in (("scheduler", ""), ("call", "mapping")):
        if case[name] != value:
            yield case | {name: value}
    yield from _parameters(case)
    yield from _inputs(case)
    yield from _batches(case)


def _without(items: list[Any], i: int) -> list[Any]:
    return [*items[:i], *items[i + 1 :]]


def _statements(case: Case) -> Iterator[Case]:
    """Cases with a value replaced by an earlier one of its kind, or a line of a statement left
    out."""
    body = case["body"]
    for i in reversed(range(len(body))):
        item = body[i]
        earlier = [s["to"] for s in body[:i] if s["kind"] == item["kind"]]
        for name in earlier[::-1][:3] + earlier[:1]:
            made = copy.deepcopy(case)
            del made["body"][i]
            for s in made["body"][i:]:
                s["code"] = re.sub(rf"\b{item['to']}\b", name, s["code"])
            for part in ("loss", "returned"):
                if made.get(part) == item["to"]:
                    made[part] = name
            made["outputs"] = {
                k: name if v == item["to"] else v for k, v in made["outputs"].items()
            }
            yield clean(made)
        for code in simpler(item["code"]):
            made = copy.deepcopy(case)
            made["body"][i]["code"] = code
            yield clean(made)
        if item["kind"] == "loss":
            for s in body[:i]:
                if s["kind"] in ("hidden", "pooled", "wide"):
                    made = copy.deepcopy(case)
                    made["body"][i]["code"] = f"{s['to']}.pow(2).mean()"
                    yield clean(made) if made["body"][i] != item else case


def simpler(code: str) -> Iterator[str]:
    """Variants of the code, each with something left out."""
    lines = code.split("\n")
    for i in range(len(lines) - 1):
        if len(lines) > 1:
            yield "\n".join(_without(lines, i))
    for found in re.finditer(r"F\.linear\((\w+), `[^`]+`, (?:None|`[^`]+`)\)", code):
        yield code[: found.start()] + found[1] + code[found.end() :]
    for found in re.finditer(r"part\d+_\d+\((\w+)\)", code):
        yield code[: found.start()].removesuffix("self.") + found[1] + code[found.end() :]
    for found in re.finditer(r"\((\w+) @ `[^`]+` \+ `[^`]+`\)", code):
        yield code[: found.start()] + found[1] + code[found.end() :]
    for found in re.finditer(r"(F\.linear\(\w+, `[^`]+`), `[^`]+`\)", code):
        yield code[: found.start()] + f"{found[1]}, None)" + code[found.end() :]
    for found in re.finditer(r", (scale=0\.5|dropout_p=[^)]+|label_smoothing=0\.1)", code):
        yield code[: found.start()] + code[found.end() :]
    for found in re.finditer(r"^= (\w+) \+ (\w+)$", code, re.MULTILINE):
        yield code[: found.start()] + f"= {found[2]}" + code[found.end() :]
    for found in re.finditer(r"(\w+) \+ ", code):
        yield code[: found.start()] + code[found.end() :]


def _parameters(case: Case) -> Iterator[Case]:
    for i in range(len(case["aliases"])):
        yield case | {"aliases": _without(case["aliases"], i)}
    text = "\n".join(s["code"] for s in case["body"])
    for i, p in enumerate(case["parameters"]):
        if f"`{p['path']}`" not in text:
            yield case | {"parameters": _without(case["parameters"], i)}
        for name, value in (("layout", "rows"), ("frozen", False), ("buffer", False)):
            if p[name] != value:
                made = copy.deepcopy(case)
                made["parameters"][i][name] = value
                yield made
        short = f"w{i}"
        if p["path"] != short and all(q["path"] != short for q in case["parameters"]):
            made = copy.deepcopy(case)
            made["parameters"][i]["path"] = short
            for s in made["body"]:
                s["code"] = s["code"].replace(f"`{p['path']}`", f"`{short}`")
            for a in made["aliases"]:
                a[1] = short if a[1] == p["path"] else a[1]
            for a in made["history"]:
                if "code" in a:
                    a["code"] = a["code"].replace(repr(p["path"]), repr(short))
            yield made


def _inputs(case: Case) -> Iterator[Case]:
    plain = {"ids": "int64", "mask": "int64", "lengths": "int64"}
    for kind, item in case["inputs"].items():
        for name, value in (
            ("layout", "rows"),
            ("dtype", plain.get(kind, item["dtype"])),
            ("name", kind),
        ):
            if item[name] != value:
                made = copy.deepcopy(case)
                made["inputs"][kind][name] = value
                yield made


def _batches(case: Case) -> Iterator[Case]:
    if any(a.get("batch") for a in case["history"]):
        history = [a | {"batch": 0} if "batch" in a else a for a in case["history"]]
        yield case | {"history": history, "batches": case["batches"][:1]}
    used = {a["batch"] for a in case["history"] if "batch" in a}
    for i, spec in enumerate(case["batches"]):
        if i not in used:
            continue
        for name, least in (("size", 2), ("length", 2), ("size", 1), ("length", 1)):
            for value in (least, spec[name] - 1):
                if least <= value < spec[name]:
                    yield _with_batch(case, i, **{name: value})
        for name, value in (("padding", "full"), ("padding", "right"), ("labelled", 1.0)):
            if spec[name] != value and spec["padding"] != "full":
                yield _with_batch(case, i, **{name: value})


def _with_batch(case: Case, i: int, **changes: Any) -> Case:
    made = copy.deepcopy(case)
    made["batches"][i] |= changes
    return made
