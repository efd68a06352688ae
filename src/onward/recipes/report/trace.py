"""The planned step as a trace in Chrome's trace-event JSON, which Perfetto opens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from onward.recipes.report.tables import seconds_key


def trace(step: Mapping[str, Any]) -> dict[str, Any]:
    """One complete event for each launch in order, and a counter of the arena's live bytes."""
    key = seconds_key(step)
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "planned step"}}
    ]
    now = 0.0
    for launch in step["launches"]:
        took = launch[key] * 1e6  # microseconds
        counted = {"live bytes": launch["alive"]}
        events.append({"ph": "C", "name": "arena", "pid": 1, "tid": 0, "ts": now, "args": counted})
        events.append(
            {
                "ph": "X",
                "name": launch["op"],
                "cat": "backward" if launch["backward"] else "forward",
                "pid": 1,
                "tid": 1,
                "ts": now,
                "dur": took,
                "args": {name: launch[name] for name in ("module", "flops", "bytes")},
            }
        )
        now += took
    times = "measured" if key == "seconds" else "modelled by the planner's rates"
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"times": times, "counter": "bytes of the step's arena that are alive"},
    }
