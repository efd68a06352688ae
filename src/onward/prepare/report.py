"""Report: the last training step as a table or a dict; and short representations for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import torch

from onward.journal import Journal
from onward.memory_amounts import mib
from onward.plan import Plan
from onward.prepare.prepared_batch import PreparedBatch
from onward.prepare.without_gradient import WithoutGradient
from onward.rewrite import summary


class Report(dict[str, Any]):
    """The result of `Trainer.report()`: printed it is a table; it is also a dict.

    compile_seconds: by stage. passes: each rewrite pass's name, edits, seconds, nodes left.
    near_misses: places that a pass left unfused: its `pass`, the `op`, the `reason`, the `modules`.
    predicted_peak_bytes: beyond the user's parameters. launches: of the last step's plan. rows: of
    the last training step, `arithmetic_done` (a share) and the `counts` of rows. no_gradient: paths
    of parameters that require a gradient but that the loss does not depend on; they are not
    updated. frozen: paths of parameters with `requires_grad=False`. notes: remarks of the capture
    for the user. own_step: why the optimizer's own `step()` made the update of a Trainer's step;
    None where the graph did.
    """

    def to_dict(self) -> dict[str, Any]:
        """A plain dict of JSON-serializable values."""
        return dict(self)

    def __repr__(self) -> str:
        seconds = sum(self.get("compile_seconds", {}).values())
        peak = self.get("predicted_peak_bytes", 0)
        return (
            f"Report({self.get('launches')} launches, peak {mib(peak)}, compiled in "
            f"{seconds:.2f} s)"
        )

    def __str__(self) -> str:
        stages: Mapping[str, float] = self.get("compile_seconds", {})
        lines = [f"{'compile stage':<32}{'seconds':>9}"]
        lines += [f"  {name:<30}{seconds:>9.3f}" for name, seconds in stages.items()]
        lines.append(f"  {'total':<30}{sum(stages.values()):>9.3f}")
        lines += ["", f"{'pass':<32}{'seconds':>9}{'edits':>8}{'nodes left':>12}"]
        for item in self.get("passes", ()):
            lines.append(
                f"  {item['name']:<30}{item['seconds']:>9.3f}{item['edits']:>8}{item['nodes']:>12}"
            )
        peak = self.get("predicted_peak_bytes", 0)
        lines += [
            "",
            f"launches        {self.get('launches')}",
            f"predicted peak  {mib(peak, 2)} beyond the parameters",
        ]
        rows: Mapping[str, Any] = self.get("rows", {})
        if rows:
            counts = ", ".join(f"{name} {n}" for name, n in rows.get("counts", {}).items())
            lines.append(
                f"last batch      {rows.get('arithmetic_done', 1.0):.1%} of the arithmetic done"
                + (f"; rows: {counts}" if counts else "; on every row")
            )
        still = WithoutGradient(tuple(self.get("no_gradient", ())), tuple(self.get("frozen", ())))
        lines += [f"{what:<16}{names}" for what, names in still.lines()]
        if self.get("own_step"):
            lines.append(f"{'update':<16}by the optimizer's own step(), since {self['own_step']}")
        for miss in self.get("near_misses", ()):
            first, *more = miss["modules"]
            places = f"{first} and {len(more)} more" if more else first
            lines.append(f"not fused: {miss['op']} at {places}: {miss['reason']}")
        lines += [f"note: {note}" for note in self.get("notes", ())]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return as_html(self)


def report_of(
    journal: Journal,
    notes: Sequence[str],
    prepared: PreparedBatch[Any],
    still: WithoutGradient,
) -> Report:
    """Reports a batch that has run and the compilation before it. still: parameters without a
    gradient."""
    plan: Plan = prepared.executable.plan
    return Report(
        compile_seconds=dict(journal.seconds),
        passes=[r.numbers for r in journal.reports],
        near_misses=summary(m for r in journal.reports for m in r.misses),
        predicted_peak_bytes=plan.peak,
        launches=len(plan.launches),
        rows=prepared.rows,
        no_gradient=list(still.unreached),
        frozen=list(still.frozen),
        notes=list(notes),
    )


def as_html(thing: object) -> str:
    """HTML of a Report or the like: its repr, which unfolds to the whole table."""
    return (
        f"<details><summary><code>{escape(repr(thing))}</code></summary>"
        f"<pre>{escape(str(thing))}</pre></details>"
    )


def tensor_text(tensor: torch.Tensor | None) -> str:
    """A scalar as its number, any other tensor as dtype and shape: `float32[4, 12]`."""
    if tensor is None:
        return "None"
    if tensor.numel() == 1:
        return f"{tensor.item():.6g}"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
