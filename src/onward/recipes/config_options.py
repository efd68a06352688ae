"""`onward config`: the options of `onward finetune` with their sources, and the JSON schema of the
file that holds them. All of it runs without torch."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from onward.recipes.option_sources import Given
from onward.recipes.options import CONDITIONS, FinetuneConfig, option
from onward.recipes.switches import RENAMED

_OPTIONS = {field.name: field for field in dataclasses.fields(FinetuneConfig)}


@dataclass(frozen=True)
class ShowConfig(FinetuneConfig):
    """Options of `onward config show`: those of finetune, and how they are shown."""

    json: bool = option(False, "print JSON in place of a table")


def shown_values(config: ShowConfig, given: Mapping[str, Given]) -> str:
    """Each option's value and source: a table, or JSON."""
    values = {name: getattr(config, name) for name in _OPTIONS}
    if config.json:
        said = {}
        for name, value in values.items():
            said[name] = {"value": value, "source": "default", "where": None}
            if name in given:
                said[name] |= {"source": given[name].source, "where": _place(given[name])}
        return json.dumps(said, indent=2)
    rows = [("option", "value", "from")]
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        rows.append((name, text, _place(given[name]) if name in given else "default"))
    widths = [min(40, max(len(row[i]) for row in rows)) for i in range(2)]
    return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}" for a, b, c in rows)


def _place(given: Given) -> str:
    if given.source == "command line":
        return "command line"
    return given.where.removeprefix("in ").removeprefix("the ")


# ---- the schema

_SIMPLE = {int: "integer", float: "number", bool: "boolean", str: "string", type(None): "null"}
_NUMBER = r"(-?[\d.]+)"
_BETWEEN = ("exclusiveMinimum", "exclusiveMaximum")
# what the words of a condition say of a number, as keywords of JSON Schema
_BOUNDS = (
    (re.compile(rf"from {_NUMBER} to below {_NUMBER}"), ("minimum", "exclusiveMaximum")),
    (re.compile(rf"between {_NUMBER} and {_NUMBER}"), _BETWEEN),
    (re.compile(rf"from {_NUMBER} to {_NUMBER}"), ("minimum", "maximum")),
    (re.compile(rf"above {_NUMBER}"), ("exclusiveMinimum",)),
    (re.compile(rf"of at least {_NUMBER}\b.*"), ("minimum",)),
    (re.compile(rf"of {_NUMBER} or more"), ("minimum",)),
)


def schema() -> dict[str, Any]:
    """The JSON schema of a file of options: what it accepts, `onward finetune` accepts, but for
    files and folders, and values that a model decides."""
    hints = typing.get_type_hints(FinetuneConfig)
    usual = FinetuneConfig()
    words = {name: said for name, _, said in CONDITIONS}
    properties: dict[str, Any] = {}
    for name, field in _OPTIONS.items():
        types_of = _types(hints[name], words.get(name, ""))
        if field.metadata.get("several"):
            types_of.append({"type": "array", "items": {"type": "string"}})
        about = types_of[0] if len(types_of) == 1 else {"anyOf": types_of}
        properties[name] = {
            "description": field.metadata["help"], "default": getattr(usual, name), **about
        }  # fmt: skip
    for alias, name in RENAMED.items():
        properties[alias] = {
            "description": f"another name of {name}", "$ref": f"#/properties/{name}"
        }  # fmt: skip
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Options of onward finetune",
        "description": "The YAML file that --config names: one option a line.",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        "allOf": _together(),
    }


def _types(hint: Any, words: str) -> list[dict[str, Any]]:
    """A type hint as schemas, one for each kind of value; words: the condition on a number."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return [each for part in typing.get_args(hint) for each in _types(part, words)]
    if typing.get_origin(hint) is typing.Literal:
        return [{"enum": list(typing.get_args(hint))}]
    bounds = _bounds(words) if hint in (int, float) else {}
    return [{"type": _SIMPLE[hint], **bounds}]


def _bounds(words: str) -> dict[str, int | float]:
    for pattern, keywords in _BOUNDS:
        if found := pattern.match(words):
            numbers = [float(n) if "." in n else int(n) for n in found.groups()]
            return dict(zip(keywords, numbers, strict=True))
    return {}


def _together() -> list[dict[str, Any]]:
    """The conditions on two options that a schema can say."""

    def has(name: str, said: Mapping[str, Any]) -> dict[str, Any]:
        return {"required": [name], "properties": {name: said}}

    given = {"not": {"type": "null"}}
    on = {"const": True}
    pairs = [
        ("bf16", on, "fp16", on),
        ("warmup_ratio", {"exclusiveMinimum": 0, "type": "number"}, "warmup_steps",
         {"exclusiveMinimum": 0, "type": "integer"}),
        ("gradient_checkpointing", on, "memory_budget", given),
    ]  # fmt: skip
    refused = [{"not": {"allOf": [has(a, x), has(b, y)]}} for a, x, b, y in pairs]
    needed = [
        ("eval_steps", has("eval_strategy", {"const": "steps"})),
        ("validation_file", {"anyOf": [has(n, given) for n in ("train_file", "train_data_file")]}),
    ]
    return refused + [{"if": has(name, given), "then": then} for name, then in needed]


def shown_schema() -> str:
    """The schema as text."""
    return json.dumps(schema(), indent=2)


__all__ = ["ShowConfig", "schema", "shown_schema", "shown_values"]
