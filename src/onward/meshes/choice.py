"""MeshChoice: the predicted candidates of a step, and the one that is chosen among them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from onward.errors import OnwardError, one_line
from onward.memory_amounts import mib
from onward.meshes.candidates import MeshCandidate
from onward.meshes.prediction import MEMORY_KINDS, StepPrediction

MARGIN = 0.05  # by which another mesh has to be faster than the usual one
BUILT = 3  # candidates beside the usual one whose graphs are built
SHOWN = 16  # candidates in a table, and all that were built
_USABLE = 0.9  # share of a rank's memory that a step may fill; the runtime needs the rest
_MORE = 4  # candidates that are built where none of the first fits
_SLACK = 1.2  # by which counts may be wrong about memory


@dataclass(frozen=True)
class MeshChoice:
    """The candidates of a step, in the order of their seconds, and the best of them. memory: bytes
    of a rank. usual: what "auto" stands for where nothing is better. why: the reason for the
    choice. where: the machine that it is predicted for. is_asked_for: a user has named the mesh,
    so that there was nothing to choose."""

    chosen: StepPrediction
    usual: MeshCandidate
    table: tuple[StepPrediction, ...]
    memory: float
    why: str
    where: str
    is_asked_for: bool = False

    def line(self) -> str:
        """The choice in one line."""
        one = self.chosen
        said = str(one.candidate) if self.is_asked_for else f'mesh="auto" is {one.candidate}'
        return (
            f"{said}: {_ms(one.seconds)} ms an update and {mib(one.nbytes, 0)} a rank are "
            f"predicted; {self.why}"
        )

    def as_dict(self) -> dict[str, Any]:
        """The choice as a dict of JSON-serializable values."""
        return {
            "machine": self.where,
            "memory_of_a_rank": self.memory,
            "chosen": str(self.chosen.candidate),
            "usual": str(self.usual),
            "why": self.why,
            "meshes": [one.as_dict() for one in self.table],
        }

    def __str__(self) -> str:
        lines = [f"meshes on {self.where}, {mib(self.memory, 0)} for each rank"]
        lines += table_lines(self.table, self.memory, self.chosen.candidate)
        lines += ["", self.line(), "", *details(self.chosen)]
        return "\n".join(lines)


def fits(nbytes: float, memory: float) -> bool:
    """Whether a rank's bytes fit into its memory, a tenth of which is left to the runtime."""
    return nbytes <= _USABLE * memory


def chosen(
    quick: Sequence[StepPrediction],
    build: Callable[[MeshCandidate], StepPrediction],
    memory: float,
    where: str,
) -> MeshChoice:
    """Chooses the fastest candidate that fits. quick: all candidates, predicted from counts, the
    usual one first. build: predicts a candidate from its graph. Raises OnwardError where no
    candidate is possible, with the reason of the usual one.

    The usual one stays unless it does not fit, or another is faster by more than `MARGIN` without
    cutting the optimizer's state, which a program may want to read: that is for memory alone. Where
    nothing fits, the one that needs least is taken: predictions of memory leave out what other
    libraries hold, but they may be too high as well.
    """
    usual = quick[0].candidate
    built = {usual: _built(build, usual)}
    order = sorted(quick[1:], key=lambda one: one.seconds)
    hopeful = [one for one in order if fits(one.nbytes, _SLACK * memory)]
    hopeful = [one for one in hopeful if _may_win(one, quick[0], built[usual], memory)]
    for one in hopeful[:BUILT]:
        built[one.candidate] = _built(build, one.candidate)
    if not any(_is_good(one, memory) for one in built.values()):
        smallest = sorted(order, key=lambda one: one.nbytes)
        rest = [one.candidate for one in smallest if one.candidate not in built]
        for other in rest[:_MORE]:
            built[other] = _built(build, other)
            if _is_good(built[other], memory):
                break
    able = [one for one in built.values() if not one.refusal]
    if not able:
        raise OnwardError(built[usual].refusal)
    best, why = _best(able, usual, built[usual], memory)
    rest = [one for one in quick if one.candidate not in built]
    rank = {one.candidate: i for i, one in enumerate(quick)}
    table = sorted(
        [*built.values(), *rest],
        key=lambda one: (bool(one.refusal), one.seconds, rank[one.candidate]),
    )
    return MeshChoice(best, usual, tuple(table), memory, why, where)


def _best(
    able: Sequence[StepPrediction], usual: MeshCandidate, first: StepPrediction, memory: float
) -> tuple[StepPrediction, str]:
    good = [one for one in able if fits(one.nbytes, memory)]
    if not good:
        least = min(able, key=lambda one: one.nbytes)
        said = f"none fits {mib(memory, 0)}, and this one needs least"
        return least, said
    fastest = min(good, key=lambda one: one.seconds)
    is_usual_good = first in good
    if not is_usual_good and not first.refusal:
        said = f"{usual} would need {mib(first.nbytes, 0)} of {mib(memory, 0)}"
        return fastest, said
    if first.refusal:
        return fastest, f"{usual} is not possible: {first.refusal}"
    fastest = min((one for one in good if _has_state(one, usual)), key=lambda one: one.seconds)
    if fastest.seconds < (1 - MARGIN) * first.seconds:
        return fastest, f"{usual} would take {_ms(first.seconds)} ms"
    if len(able) == 1:
        return first, "it fits, and nothing promises to be faster"
    return first, f"it fits, and nothing is faster by more than {MARGIN:.0%}"


def _may_win(
    one: StepPrediction, counted: StepPrediction, first: StepPrediction, memory: float
) -> bool:
    """Whether a candidate is worth its graph: the usual one cannot be taken, or the counts promise
    more than they may be wrong by."""
    if not _is_good(first, memory):
        return True
    return one.seconds < counted.seconds and _has_state(one, counted.candidate)


def _has_state(one: StepPrediction, usual: MeshCandidate) -> bool:
    """Whether ranks have as much of the optimizer's state as on the usual mesh."""
    return one.candidate.zero <= usual.zero


def _is_good(one: StepPrediction, memory: float) -> bool:
    return not one.refusal and fits(one.nbytes, memory)


def _built(
    build: Callable[[MeshCandidate], StepPrediction], candidate: MeshCandidate
) -> StepPrediction:
    try:
        return build(candidate)
    except OnwardError as error:
        return refused(candidate, str(error))


def refused(candidate: MeshCandidate, why: str) -> StepPrediction:
    """A candidate that is not possible."""
    nothing: dict[str, int] = dict.fromkeys(MEMORY_KINDS, 0)
    return StepPrediction(candidate, 0, 0.0, 0.0, 0.0, nothing, refusal=one_line(why, 300))


# ---- shown


def table_lines(
    table: Iterable[StepPrediction], memory: float, taken: MeshCandidate | None = None
) -> list[str]:
    """Formats the candidates, one line each: `*` the chosen one, `~` one that is only estimated by
    formulae (of which the fastest are shown); `!` marks more memory than a rank has."""
    head = ("ms", "exposed", *MEMORY_KINDS, "all, MiB")
    lines = ["  " + " ".join(f"{word:>11}" for word in head) + "  mesh"]
    left = 0
    for number, one in enumerate(table):
        if number >= SHOWN and not one.built and one.candidate != taken:
            left += 1
            continue
        mark = "*" if one.candidate == taken else " " if one.built else "~"
        if one.refusal:
            lines.append(f"{mark} {one.candidate}: {one.refusal}")
            continue
        share = one.exposed / one.seconds if one.seconds else 0.0
        cells = [_ms(one.seconds), f"{share:.0%}"]
        cells += [f"{one.memory[kind] / 2**20:,.0f}" for kind in MEMORY_KINDS]
        cells.append(f"{one.nbytes / 2**20:,.0f}" + ("" if fits(one.nbytes, memory) else "!"))
        lines.append(f"{mark} " + " ".join(f"{c:>11}" for c in cells) + f"  {one.candidate}")
    if left:
        lines.append(f"  ... and {left} more estimates")
    lines.append("  (exposed: waits for exchanges; ~ estimated, without a graph; ! does not fit)")
    return lines


def _ms(seconds: float) -> str:
    """Milliseconds with three digits."""
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def details(one: StepPrediction) -> list[str]:
    """The exchanges of a mesh in an update, by kind and axis, and what each rank sends."""
    lines = [f"exchanges of {one.candidate} in an update"]
    if not one.exchanges:
        return [*lines, "  none"]
    lines.append(f"  {'exchange':<16}{'along':<14}{'count':>7}{'sent, MiB':>12}{'alone, ms':>12}")
    for x in one.exchanges:
        lines.append(
            f"  {x.op:<16}{x.axis:<14}{x.count:>7}{x.sent / 2**20:>12,.1f}{_ms(x.seconds):>12}"
        )
    lines += [f"  along {axis} a rank sends {mib(n)}" for axis, n in one.sent().items()]
    return lines


__all__ = [
    "BUILT", "MARGIN", "SHOWN", "MeshChoice", "chosen", "details", "fits", "refused", "table_lines",
]  # fmt: skip
