"""A case without what nothing in it reads."""

from __future__ import annotations

import re

from fuzz.maker import Case


def uses(case: Case, name: str) -> bool:
    """Whether a value is read by another statement, or returned."""
    end = case["returned"] if case.get("loss_fn") else case["loss"]
    if name == end or name in case["outputs"].values():
        return True
    return any(re.search(rf"\b{name}\b", s["code"]) for s in case["body"] if s["to"] != name)


def clean(case: Case) -> Case:
    """The case without statements, inputs, modules and parameters that nothing reads."""
    body = case["body"]
    while True:
        kept = [s for s in body if uses({**case, "body": body}, s["to"])]
        if len(kept) == len(body):
            break
        body = kept
    text = "\n".join(s["code"] for s in body)
    inputs = {k: v for k, v in case["inputs"].items() if f"${k}$" in text}
    modules = [x for x in case["modules"] if f"self.{x['path']}(" in text]
    aliases = [a for a in case["aliases"] if f"`{a[1]}`" in text]
    parameters = [
        p for p in case["parameters"] if f"`{p['path']}`" in text or p["shape"][:1] == [3]
    ]  # a first size of 3 marks what is meant to be read by nobody
    found = {k: v for k, v in case["attributes"].items() if f"self.{k}" in text}
    return case | {
        "body": body, "inputs": inputs, "modules": modules, "aliases": aliases,
        "parameters": parameters, "attributes": found,
    }  # fmt: skip
