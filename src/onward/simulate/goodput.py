"""Goodput: the share of a run's time that is training, under failures and with checkpoints.

Failures come at random, with the mean of a node's hours divided by the nodes; each costs a restart
and what was done since the last checkpoint. The interval is Young's (1974), sqrt(2 x checkpoint x
mean); the expected time of a run is Daly's (2006, "A higher order estimate of the optimum
checkpoint interval for restart dumps", equation 13).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from onward.simulate.step import StepEstimate

_SAVED = 12 + 2  # bytes of a parameter in a checkpoint: master weight, two moments, weight


@dataclass(frozen=True)
class Goodput:
    """Seconds between failures, of a checkpoint and between two, and the share of training."""

    between_failures: float
    checkpoint: float
    interval: float
    share: float


def goodput(step: StepEstimate) -> Goodput:
    """The goodput of a run of this step. Each rank writes its part of a checkpoint."""
    failures, layout = step.cluster.failures, step.layout
    nodes = math.ceil(layout.ranks / step.cluster.per_node)
    mean = failures.node_hours * 3600 / nodes
    nbytes = _SAVED * step.model.parameters / layout.ranks
    checkpoint = nbytes / failures.checkpoint_bandwidth
    if math.isinf(mean):
        return Goodput(mean, checkpoint, math.inf, 1.0)
    interval = max(step.seconds, math.sqrt(2 * checkpoint * mean))
    return Goodput(
        mean, checkpoint, interval, useful(interval, checkpoint, mean, failures.restart_seconds)
    )


def useful(interval: float, checkpoint: float, mean: float, restart: float) -> float:
    """Daly's share of useful seconds: work over the expected wall-clock time for it."""
    exponent = (interval + checkpoint) / mean
    if exponent + restart / mean > 500:
        return 0.0
    return interval / (mean * math.exp(restart / mean) * math.expm1(exponent))


__all__ = ["Goodput", "goodput", "useful"]
