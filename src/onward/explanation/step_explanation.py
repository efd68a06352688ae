"""StepExplanation: the facts of one training step, and ways to show them."""

from __future__ import annotations

from pathlib import Path

from onward.errors import CaptureError
from onward.explanation import page
from onward.explanation.facts import StepFacts
from onward.explanation.row_report import KeptRows, RowReport, RowSet
from onward.explanation.text import text
from onward.memory_amounts import mib


class StepExplanation(StepFacts):
    """The explanation of one training step: print it, take `as_dict()`, or `save` it as a page.

    The content of `rows`, a `RowReport`, is available here too: `sets`, `whole`, `kept`, `done`,
    `everything`, `packed`, `together`, `share` and `svg()`. Each raises CaptureError, with the
    reasons, where no graph runs.
    """

    # ---- rows

    @property
    def sets(self) -> list[RowSet]:
        """The sets of rows that are computed together."""
        return self._rows().sets

    @property
    def whole(self) -> tuple[str, ...]:
        """The modules that compute every row."""
        return self._rows().whole

    @property
    def kept(self) -> list[KeptRows]:
        """The causes of rows that no output needs, each with its share of the FLOPs."""
        return self._rows().kept

    @property
    def done(self) -> float:
        """FLOPs of the forward's products on the rows that are read."""
        return self._rows().done

    @property
    def everything(self) -> float:
        """FLOPs of the forward's products on all rows."""
        return self._rows().everything

    @property
    def packed(self) -> bool:
        """Whether only the rows that are read are computed."""
        return self._rows().packed

    @property
    def together(self) -> float:
        """The share of FLOPs that would be avoided without all of `kept`."""
        return self._rows().together

    @property
    def share(self) -> float:
        """The FLOPs done as a share of those for all rows."""
        return self._rows().share

    def svg(self) -> str:
        """Draws the rows as SVG: a grid for each set."""
        return self._rows().svg()

    def _rows(self) -> RowReport:
        if self.rows is None:
            why = "; ".join(self.reasons)
            raise CaptureError(f"no graph runs, so that no rows are known: {why}")
        return self.rows

    # ---- output

    def save(self, path: str | Path) -> Path:
        """Writes a file: an HTML page if its name ends in `.html`, else the drawing of rows as
        SVG."""
        path = Path(path)
        if path.suffix.lower() in (".html", ".htm"):
            path.write_text(page.page(self), encoding="utf-8")
            return path
        return self._rows().save(path)

    def __repr__(self) -> str:
        if not self.captured:
            return f"StepExplanation({self.model}: runs in eager PyTorch)"
        total = 0 if self.memory is None else self.memory.total
        return (
            f"StepExplanation({self.model}, {self.loop}: {self.launch_count} launches, "
            f"{mib(total)})"
        )

    def __str__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        return page.body(self)


__all__ = ["StepExplanation"]
