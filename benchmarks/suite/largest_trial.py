"""One trial of the search for the largest batch: three steps in a fresh process, and its peak."""

from __future__ import annotations

from typing import Any

from suite.cases import Case
from suite.engines import ENGINES
from suite.memory import Memory
from suite.question import answer
from suite.session import Session

_STEPS = 3  # AdamW's moments exist after the first


def peak(case: Case, engine: str, threads: int, limit: int) -> int:
    """VmHWM of this process, in bytes, after the steps, or after the one that passed the limit."""
    import torch

    if threads:
        torch.set_num_threads(threads)
    memory = Memory("cpu")
    session = Session(ENGINES[engine], case, "cpu", _STEPS)
    session.attach()
    for batch in session.batches:
        float(session.step(batch))
        if memory.peak() > limit:
            break
    return memory.peak()


def _answer(request: dict[str, Any]) -> int:
    case = Case(**request["case"])
    return peak(case, request["engine"], request["threads"], request["limit"])


if __name__ == "__main__":
    answer(_answer)
