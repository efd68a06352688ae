"""A question to a module of the suite that answers in a fresh process; JSON there and back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).resolve().parents[1]  # where the package `suite` lies


class QuestionError(RuntimeError):
    """The process came to no answer; the message is the last line that it wrote."""


def ask(
    module: str,
    request: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
    timeout: float = 600.0,
) -> Any:
    """Runs `module`, which calls `answer`. Raises QuestionError, and TimeoutError after `timeout`
    seconds."""
    path = os.pathsep.join(filter(None, (str(_FOLDER), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", module], input=json.dumps(request),
            env={**os.environ, **(env or {}), "PYTHONPATH": path},
            capture_output=True, text=True, timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"{module}: no answer within {timeout:.0f} s") from None
    if done.returncode:
        last = "".join(done.stderr.strip().splitlines()[-1:])
        raise QuestionError(f"{module}, exit {done.returncode}: {last}")
    return json.loads(done.stdout.splitlines()[-1])


def answer(function: Callable[[dict[str, Any]], Any]) -> None:
    """The far side: one request from stdin, its answer on stdout."""
    print(json.dumps(function(json.load(sys.stdin))))
