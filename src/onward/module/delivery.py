"""Delivery: a call's results in the container that the forward returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from onward.module.run import CallRun, GivenResults
from onward.module.waiting import NOTHING, Waits


def deliver(run: CallRun, held: Callable[[str], torch.Tensor], outputs: str) -> Any:
    """Runs a prepared call and returns its results in the forward's container. held: returns the
    module's tensor of a path. outputs: the option of that name."""
    call, gradients = run.call, run.gradients
    results = run.outputs()
    tree = call.captured.tree
    assert tree is not None, "captured whole"
    missing = [name for name in call.results if name not in results]
    filler = None if outputs == "loss" else NOTHING
    built = tree.build({**results, **dict.fromkeys(missing, filler)}, run.batch.tensors, held)
    fields = call.fields if outputs == "auto" else {}
    if not fields:
        return built
    given = GivenResults(results if missing else {})

    def compute() -> dict[str, torch.Tensor]:
        """Computes the results that were left out, by field."""
        with torch.inference_mode(False), torch.set_grad_enabled(gradients):
            found = run.again(missing, given).outputs()
        return {field: found[name] for field, name in fields.items() if name in found}

    absent = [field for field, name in fields.items() if name in missing]
    return Waits(fields, absent, call.next_call(), compute).watch(built)


__all__ = ["deliver"]
