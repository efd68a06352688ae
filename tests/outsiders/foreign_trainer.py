"""pytest plugin: transformers' Trainer, in whatever tests a tester brings, is the side's own.

    OUTSIDERS_SIDE=stock|drop-in|accelerated OUTSIDERS_LOG=file pytest -p foreign_trainer ...

Each outcome is a line of JSON in the log: test, outcome, the first line of what it said. A name
that the tests import and the installed transformers lacks is a stand-in: a `require_*` skips.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import sys
import unittest
from pathlib import Path
from typing import Any

import pytest
import transformers

SIDES = ("stock", "drop-in", "accelerated")


def put_in_place(side: str) -> None:
    """Makes transformers' trainers those of that side."""
    if side == "drop-in":
        from onward.integrations.transformers import Seq2SeqTrainer, Trainer

        # the module that others import may be another object than the one imported first
        for module in (transformers, sys.modules["transformers"]):
            vars(module).update(Trainer=Trainer, Seq2SeqTrainer=Seq2SeqTrainer)
    elif side == "accelerated":
        import onward
        from onward.module import accelerated

        plain = transformers.Trainer.__init__

        def with_graphs(self: Any, *args: Any, **kwargs: Any) -> None:
            plain(self, *args, **kwargs)
            model = self.model
            if model is not None and accelerated(model) is None:
                onward.accelerate(model)

        transformers.Trainer.__init__ = with_graphs  # type: ignore[method-assign]


def stand_in(name: str) -> Any:
    """For a name that is not there."""
    if name.startswith("require"):

        def require(*given: Any, **_: Any) -> Any:
            skip = unittest.skip(f"{name} is not in transformers {transformers.__version__}")
            return skip(given[0]) if given and callable(given[0]) else skip

        return require
    return type(name, (), {})


def fill(path: Path) -> list[str]:
    """Stand-ins for what a file imports from transformers and does not find; their names."""
    nodes = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom)
        and not node.level
        and (node.module or "").partition(".")[0] == "transformers"
    ]
    for node in nodes:  # all first: importing some of them replaces the module transformers
        with contextlib.suppress(ImportError):
            importlib.import_module(node.module or "")
    filled = []
    for node in nodes:
        module = sys.modules.get(node.module or "")
        for alias in node.names if module is not None else ():
            if alias.name != "*" and not hasattr(module, alias.name):
                setattr(module, alias.name, stand_in(alias.name))
                filled.append(alias.name)
    return filled


def pytest_configure(config: pytest.Config) -> None:
    put_in_place(os.environ["OUTSIDERS_SIDE"])


def pytest_collect_file(file_path: Path) -> None:
    # pytest offers the files beside the folders above the root too, whatever they hold
    if file_path.suffix == ".py" and file_path.name.startswith("test_"):
        fill(file_path)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    result = yield
    report = result.get_result()
    if report.when == "call" or (report.when == "setup" and not report.passed):
        said = report.longrepr
        crash = getattr(said, "reprcrash", None)
        text = crash.message if crash else str(said or "")
        line = {
            "test": item.nodeid, "outcome": report.outcome,
            "said": (text.splitlines() or [""])[0][:300],
        }  # fmt: skip
        with Path(os.environ["OUTSIDERS_LOG"]).open("a") as log:
            log.write(json.dumps(line) + "\n")
