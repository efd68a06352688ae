"""Recording: the launches of a step as one CUDA graph, which the host queues in one call.

A step of a small model on a GPU is bound by the host, which needs about 10 us per operator. A
recording holds addresses and sizes: it is valid while the launches stay bound as they are. Source:
CUDA Graphs, https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs.
"""

from __future__ import annotations

import logging

import torch

from onward.execute.binder import Binder
from onward.plan import Plan

log = logging.getLogger("onward")


class Recording:
    """The launches before the commit, recorded in the second run of a binding.

    The first run is not recorded: libraries initialize and kernels compile in it. If sizes change
    with every batch, nothing is ever recorded.
    """

    def __init__(self, plan: Plan, binder: Binder, device: torch.device) -> None:
        self._binder = binder
        self._numbers = range(plan.commit)
        kernels = [launch.kernel for launch in plan.launches[: plan.commit]]
        on_host = any(kernel.host or not kernel.recordable for kernel in kernels)
        self._possible = device.type == "cuda" and plan.commit > 0 and not on_host
        self._ran_at = self._recorded_at = -1
        self._graph: torch.cuda.CUDAGraph | None = None

    def run(self) -> bool:
        """Queues the recorded launches and returns True; or returns False, with nothing queued, if
        they have to run one by one."""
        if not self._possible:
            return False
        now = self._binder.bindings
        if now == self._recorded_at and self._graph is not None:
            self._graph.replay()
            return True
        self._graph = None
        if now != self._ran_at:
            self._ran_at = now
            return False
        self._graph = self._recorded()
        if self._graph is None:
            self._possible = False
            return False
        self._recorded_at = now
        self._graph.replay()
        return True

    def _recorded(self) -> torch.cuda.CUDAGraph | None:
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                for i in self._numbers:
                    self._binder.launches[i]()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            log.warning(
                "this step is not recorded as a CUDA graph and launches its kernels one by one: %s",
                reason,
            )
            return None
        return graph
