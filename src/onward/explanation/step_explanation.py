"""StepExplanation: the facts of one training step, with the ways to show them."""

from __future__ import annotations

from pathlib import Path

from onward.errors import CaptureError
from onward.explanation import page
from onward.explanation.facts import StepFacts
from onward.explanation.row_report import KeptRows, RowReport, RowSet
from onward.explanation.text import text


class StepExplanation(StepFacts):
    """One training step, explained; `print` it, or take `as_dict()`, or `save` it as a page.

    What `rows`, a `RowReport`, says of the batch can be read here as well: `sets`, `whole`, `kept`,
    `done`, `everything`, `packed`, `together`, `share` and `svg()`. Each raises CaptureError, with
    the reasons, where no graph runs.
    """

    # ---- what is said of rows

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
        """What keeps rows that no output needs, each with its share of the arithmetic."""
        return self._rows().kept

    @property
    def done(self) -> float:
        """FLOPs of the forward products on the rows that are read."""
        return self._rows().done

    @property
    def everything(self) -> float:
        """FLOPs of the forward products on all rows."""
        return self._rows().everything

    @property
    def packed(self) -> bool:
        """Whether the batch runs on the rows that are read."""
        return self._rows().packed

    @property
    def together(self) -> float:
        """The share of the arithmetic that would be spared without anything of `kept`."""
        return self._rows().together

    @property
    def share(self) -> float:
        """The share of the arithmetic that is done."""
        return self._rows().share

    def svg(self) -> str:
        """Draws the rows: a grid for each set."""
        return self._rows().svg()

    def _rows(self) -> RowReport:
        if self.rows is None:
            why = "; ".join(self.reasons)
            raise CaptureError(f"no graph runs, so that no rows are known: {why}")
        return self.rows

    # ---- shown

    def save(self, path: str | Path) -> Path:
        """Writes a file: the page where its name ends in `.html`, else the rows' drawing as SVG."""
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
            f"{total / 2**20:.1f} MiB)"
        )

    def __str__(self) -> str:
        return text(self)

    def _repr_html_(self) -> str:
        return page.body(self)


__all__ = ["StepExplanation"]
