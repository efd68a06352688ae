"""Runs one script with its arguments, and writes what it logged and how long its steps took.

    python tests/outsiders/launch.py result.json stock|drop-in|accelerated script.py arguments...

A package of metrics that is not installed is a stand-in that counts nothing: training is looked at.
"""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
import types
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from clock import Clock
from foreign_trainer import fill, put_in_place


class Nothing:
    """A metric of nothing."""

    def compute(self, **_: Any) -> dict[str, float]:
        return {"accuracy": 0.0, "score": 0.0, "overall_accuracy": 0.0}


def stand_ins() -> None:
    for name in ("evaluate", "nltk"):
        if importlib.util.find_spec(name) is None:
            made: Any = types.ModuleType(name)
            made.__spec__ = importlib.util.spec_from_loader(name, None)
            made.load = lambda *_, **__: Nothing()
            made.data = types.SimpleNamespace(find=lambda *_: None)
            sys.modules[name] = made


def watch(result: Path) -> None:
    """A callback in every Trainer that keeps the log and the times."""
    from transformers import trainer

    class Writes(Clock):
        def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            logged = [x for x in state.log_history if "loss" in x or "eval_loss" in x]
            result.write_text(json.dumps({"log": logged, "steps": self.steps}))

    trainer.DEFAULT_CALLBACKS.append(Writes)  # type: ignore[arg-type]


def main() -> None:
    result, side, script, *arguments = sys.argv[1:]
    sys.path.insert(0, str(Path(script).parent))
    stand_ins()
    for file in Path(script).parent.glob("*.py"):
        fill(file)
    watch(Path(result))
    if side == "accelerated":
        put_in_place(side)
    sys.argv = [script, *arguments]
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
