"""Runs of two towers on eleven pairs of short texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onward.recipes.describe import Run, describe
from onward.recipes.options import FinetuneConfig

NARROW = "hidden_size=32,num_attention_heads=2,intermediate_size=48,num_hidden_layers=1"
WORDS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven")
PAIRS = [
    {"query": f"what is {word}", "document": f"{word} is the number {i} of " + "many " * (i % 4)}
    for i, word in enumerate([*WORDS])
]


def config(tmp_path: Path, rows: list[dict[str, Any]] | None = None, **options: Any) -> Any:
    file = tmp_path / "pairs.jsonl"
    rows = PAIRS if rows is None else rows
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    given = {
        "train_file": str(file), "validation_file": str(file), "vocab_size": 320, "max_steps": 3,
        "per_device_train_batch_size": 4, "dropout": 0.0, "config_overrides": NARROW,
        "learning_rate": 1e-3,
    }  # fmt: skip
    return FinetuneConfig(**{"task": "text-retrieval", **given, **options})


def described(tmp_path: Path, rows: list[dict[str, Any]] | None = None, **options: Any) -> Run:
    return describe(config(tmp_path, rows, **options))


def words(tmp_path: Path, *more: str, rows: list[dict[str, Any]] | None = None) -> list[str]:
    made = config(tmp_path, rows)
    names = ("train_file", "validation_file", "vocab_size", "max_steps", "config_overrides")
    given = [f"--{name}={getattr(made, name)}" for name in names]
    given += ["--save_strategy=no", f"--output_dir={tmp_path / 'out'}"]
    return ["finetune", "--task=text-retrieval", "--per_device_train_batch_size=4", *given, *more]


__all__ = ["NARROW", "PAIRS", "WORDS", "config", "described", "words"]
