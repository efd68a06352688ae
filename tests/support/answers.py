"""A process that answers questions, each a line, with lines of JSON: Triton reads its settings when
it is first imported, so that what needs other ones runs in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parent


@contextmanager
def asked(program: str, **settings: str) -> Iterator[Callable[[str], Any]]:
    """A context with a function that asks a program of this folder one question and returns its
    answer, or what it raised as text. settings: environment variables."""
    process = subprocess.Popen(
        [sys.executable, SUPPORT / program], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env={**os.environ, **settings},
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    questions, answers = process.stdin, process.stdout

    def ask(question: str) -> Any:
        print(question, file=questions, flush=True)
        line = answers.readline()
        assert line, "the process ended"
        return json.loads(line)

    yield ask
    questions.close()
    answers.close()
    process.wait(60)


def serve(answer: Callable[[str], Any]) -> None:
    """Answers each line of the input, until it ends, with `answer` of it or what that raises."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers and kernels print goes elsewhere
    for line in sys.stdin:
        try:
            found = answer(line.strip())
        except Exception:
            found = traceback.format_exc()
        print(json.dumps(found), file=answers, flush=True)
