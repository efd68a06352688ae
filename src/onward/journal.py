"""Journal: seconds, reports and dumps of one compilation.

Each stage is timed. Its graph is checked if `ONWARD_CHECK` asks for it, written to the folder in
`ONWARD_DUMP`, and kept if a bisection will need it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from onward.environment import environment
from onward.errors import CaptureError, OnwardError
from onward.graph.check import check
from onward.graph.file import save
from onward.graph.graph import Graph
from onward.graph.ops import OPS
from onward.graph.printer import count_ops, graph_text
from onward.graph.spec import Stage, conform
from onward.plan import Plan, conform_plan
from onward.rewrite import PassReport
from onward.uncollected import uncollected

log = logging.getLogger("onward")


class Journal:
    """The journal of the compilation of one captured call.

    seconds: by stage. reports: of each pass, in order. stages: graphs by stage, if they are kept.
    quiet: for graphs that only inspect a batch and are no stage of a step; they are not dumped or
    logged.
    """

    def __init__(self, keep_stages: bool = False, quiet: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self.reports: list[PassReport] = []
        self.stages: list[tuple[str, Graph]] | None = [] if keep_stages else None
        self.quiet = quiet
        self._dumped = 0
        self._ops: Counter[str] | None = None  # of the last graph noted

    def note(self, name: str, graph: Graph, stage: Stage | None = None) -> None:
        """Records a graph after a pass, or at the end of a stage, under a name."""
        if environment().check:
            check(graph)
        if stage is not None:
            self.ends(stage, graph)
        told = not self.quiet and log.isEnabledFor(logging.DEBUG)
        self._ops = count_ops(graph) if told else None
        if self.stages is not None:
            self.stages.append((name, graph.clone()))
        folder = self._folder()
        if folder is not None:
            stem = folder / f"{self._dumped:02d}-{name.replace(' ', '-')}"
            stem.with_suffix(".txt").write_text(graph_text(graph))
            if not any(OPS[n.op_type].opaque for n in graph if n.op_type in OPS):
                save(graph, stem.with_suffix(".onnx"))  # opaque ops cannot be saved as ONNX
            self._dumped += 1

    def ends(self, stage: Stage, graph: Graph) -> None:
        """Checks the rules for the graph at the end of a stage (`graph/spec.py`)."""
        if environment().check:
            conform(graph, stage)

    @property
    def looks_at_passes(self) -> bool:
        """Whether each pass is to be observed, or the graph is no stage of a step; no cache may be
        read then."""
        asked = environment()
        return self.quiet or self.stages is not None or asked.check or asked.dump is not None

    def note_pass(self, stage: str, graph: Graph, report: PassReport) -> None:
        """Records a graph after a pass of a stage. At level DEBUG, logs each pass that made edits:
        `rewrite forward: noop: 5 edits, Reshape -3, Identity -2`."""
        before = self._ops
        self.note(f"{stage}-{report.name}", graph)
        if report.edits and before is not None and self._ops is not None:
            parts = [f"{report.edits} edits", *op_changes(before, self._ops)]
            log.debug("rewrite %s: %s: %s", stage, report.name, ", ".join(parts))

    def note_plan(self, stage: str, plan: Plan) -> None:
        """Records a plan as text, and checks it (`plan/spec.py`)."""
        if environment().check:
            conform_plan(plan)
        folder = self._folder()
        if folder is not None:
            (folder / f"{self._dumped:02d}-{stage}.txt").write_text(f"{plan}\n")
            self._dumped += 1

    def _folder(self) -> Path | None:
        folder = None if self.quiet else environment().dump
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    @contextmanager
    def timed(self, stage: str) -> Generator[None]:
        """A context for the work of a stage: it is timed, and errors name the stage."""
        if not self.quiet:
            log.debug("%s ...", stage, extra={"stage": stage})
        start = time.perf_counter()
        try:
            # A stage makes many objects that stay alive, and a full collection visits torch's too:
            # two of them took 0.6 s of the 4 s for BERT-base.
            with uncollected():
                yield
        except OnwardError:
            raise
        except (ValueError, TypeError, LookupError, AssertionError, NotImplementedError) as error:
            raise CaptureError(
                f"compiling the model failed at the stage '{stage}': {error}"
            ) from error
        seconds = time.perf_counter() - start
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        if not self.quiet:
            log.info("%s: %.3f s", stage, seconds, extra={"stage": stage, "seconds": seconds})


def op_changes(before: Counter[str], after: Counter[str]) -> list[str]:
    """The ops whose number of nodes changed, such as `Reshape -3`, largest decrease first."""
    by = {op: after[op] - before[op] for op in {*before, *after}}
    moved = sorted((n, op) for op, n in by.items() if n)
    return [f"{op} {n:+d}" for n, op in moved]
