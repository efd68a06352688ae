"""What a report says about the planned step, taken from the Trainer while it is there."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from onward.errors import OnwardError, one_line
from onward.explanation import ExplanationRequest
from onward.explanation.facts import ARENA
from onward.plan.cost import work
from onward.recipes.report.written_files import STEP
from onward.recipes.run_folder import publish_json
from onward.train import Trainer

MOST_TIMED = 1 << 28  # bytes of weights; timing needs a copy of them and of the step's memory


def write_step_facts(trainer: Trainer, folder: Path) -> None:
    """Writes `step.json`. A step that cannot be described costs one line on stderr, and the run
    goes on."""
    try:
        if trainer.snapshot().last is None:  # all updates were made before
            if not (folder / STEP).is_file():
                raise OnwardError("this process made no update")
            return
        publish_json(folder, STEP, step_facts(trainer))
    except Exception as error:  # any, since a report decides about no run
        told = one_line(str(error) or type(error).__name__, 200)
        print(f"note: the report lacks the planned step: {told}", file=sys.stderr, flush=True)


def step_facts(trainer: Trainer) -> dict[str, Any]:
    """The explanation of the step that ran last, and each of its launches. Raises OnwardError where
    no step has run, or it is cut between ranks.

    A launch has its FLOPs, the bytes that its op reads and writes, the seconds that the planner
    assumes, those of a timed run (None: not timed), and the bytes of the arena that are alive.
    rates: what the planner assumes of the machine.
    """
    last = trainer.snapshot().last_run
    weights = sum(p.numel() * p.itemsize for p in trainer.model.parameters())
    found = trainer.explain_call(None, asked=ExplanationRequest(profile=weights <= MOST_TIMED))
    memory = found.memory
    assert memory is not None, "a step that ran has a plan"
    rates = last.step.graphs.compiler.target.rates
    launches: list[dict[str, Any]] = []
    for number, launch in enumerate(last.plan.launches):
        flops, nbytes = work(launch)
        low = any(t is not None and t.is_low for t in launch.spec.inputs)
        speed = rates.low_flops_per_second if low else rates.flops_per_second
        timed = found.launch_seconds
        launches.append(
            {
                "op": launch.op,
                "module": launch.module,
                "backward": launch.backward,
                "flops": flops,
                "bytes": nbytes,
                "modelled_s": rates.launch_seconds
                + flops / speed
                + nbytes / rates.bytes_per_second,
                "seconds": timed[number] if timed else None,
                "alive": sum(memory.alive[kind][number] for kind in ARENA),
            }
        )
    return {
        "explanation": found.as_dict(),
        "launches": launches,
        "rates": dataclasses.asdict(rates),
    }
