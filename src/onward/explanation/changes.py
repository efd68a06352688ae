"""Counts the nodes of a step's graph by op, before and after each pass and stage."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator

from onward.explanation.facts import Change
from onward.graph.graph import Graph
from onward.graph.printer import count_ops
from onward.graph.spec import Stage
from onward.journal import Journal
from onward.rewrite import FORWARD, PRECISION, STEP, FusionPass, PassReport, halves
from onward.rewrite.lists import ROW_DEMAND

_STAGES = ("differentiate", "updates", "specialize")  # stages that are not passes
_OWN = "::"  # in the name of an own op
_LOOKS = "rows-"  # prefix of the stages of plans that only count rows


class CountingJournal(Journal):
    """The journal of a compilation made for an explanation, which dumps and logs nothing and reads
    no cache. counts: nodes by op, for each graph noted, by its stage."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.counts: list[tuple[str, Counter[str]]] = []

    def note(self, name: str, graph: Graph, stage: Stage | None = None) -> None:
        super().note(name, graph, stage)
        if not name.startswith(_LOOKS):
            self.counts.append((name, count_ops(graph)))

    def changes(self, captured: Graph, packed: bool) -> tuple[Change, ...]:
        """The changes in the order of the flow, starting from the captured graph. packed: whether
        the graph of row demand runs; if not, the flow continues from the graph before it."""
        before, left = count_ops(captured), deque(self.reports)
        made: list[Change] = []
        for stage, after in self.counts:
            part, _, name = stage.partition("-")
            if part in _STAGES:
                if left and left[0].name == ROW_DEMAND:  # every row is read
                    made.append(_change("pack", ROW_DEMAND, left.popleft(), before, before))
                made.append(_change("", part, None, before, after))
                before = after
                continue
            for report in _until(left, name or part):
                if report.name == (name or part):
                    made.append(_change(part if name else "", report.name, report, before, after))
                else:  # the pass changed nothing, and so has no graph of its own
                    made.append(_change(part, report.name, report, before, before))
            if packed or name != ROW_DEMAND:
                before = after
        made += [_change("", report.name, report, before, before) for report in left]
        return tuple(made)


def _until(reports: deque[PassReport], name: str) -> Iterator[PassReport]:
    """Takes reports from the front, up to and including the one of this name."""
    while reports:
        yield (report := reports.popleft())
        if report.name == name:
            return


def _change(
    stage: str, name: str, report: PassReport | None, before: Counter[str], after: Counter[str]
) -> Change:
    ops = {op: after[op] - before[op] for op in {*before, *after} if after[op] != before[op]}
    ordered = dict(sorted(ops.items(), key=lambda item: (-abs(item[1]), item[0])))
    edits = None if report is None else report.edits
    fuses = any(
        p.name == name
        for p in (*FORWARD, *PRECISION, *STEP, *halves())
        if isinstance(p, FusionPass)
    )
    fused = {op: n for op, n in ordered.items() if n > 0 and _OWN in op} if fuses else {}
    return Change(stage, name, edits, before.total(), after.total(), ordered, fused)


__all__ = ["CountingJournal"]
