"""The arguments of a program are part of what a kept capture is of, but for the command's own."""

from __future__ import annotations

import json
import runpy
import sys
import types
from pathlib import Path

import pytest

from onward import environment
from onward.capture.archive.surroundings import own_files, surroundings


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """This process as if it ran `onward` by its command line."""
    main = types.ModuleType("__main__")
    (tmp_path / "onward").write_text("from onward.cli import main\n")
    main.__file__ = str(tmp_path / "onward")
    # the files of this test are written after the process has started
    monkeypatch.setattr("onward.capture.archive.surroundings.STARTED", float("inf"))
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(environment, "_own", [])
    environment.tell_own_command()
    # the tests' modules, and those that other tests have left, are a user's
    for name in [name for name, _ in own_files() if name != "__main__"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "argv", ["onward", "finetune", "--learning_rate", "0.125"])


def said() -> str:
    return json.dumps(surroundings([]))


def test_the_commands_own_arguments_are_left_out(command: None) -> None:
    assert "0.125" not in said()


def test_those_of_a_script_within_it_are_not(command: None, tmp_path: Path) -> None:
    """`onward explain train.py -- 0.25`: a global of the script may be made of them."""
    script = tmp_path / "train.py"
    script.write_text(
        "import json, sys\n"
        "sys.argv = ['train.py', '0.25']\n"
        "from onward.capture.archive.surroundings import surroundings\n"
        "FOUND = json.dumps(surroundings([]))\n"
    )
    assert "0.25" in runpy.run_path(str(script), run_name="__main__")["FOUND"]


def test_those_beside_a_module_of_the_users_are_not(
    command: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`onward bench models.py:make`: the module may read them."""
    file = tmp_path / "models.py"
    file.write_text("import sys\nSCALE = float(sys.argv[-1])\n")
    module = types.ModuleType("models_of_a_user")
    module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "models_of_a_user", module)
    assert "0.125" in said()
