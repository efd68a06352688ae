"""The report of a verification: a row for each tensor that was compared."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class ComparedTensor:
    """One compared tensor: the norm of the difference, and the norm allowed; root mean squares over
    several runs.

    eager: of a difference from eager PyTorch in fp64, the norm of that which eager PyTorch has in
    the precision of the step; None for another engine. norm: of the tensor itself, in fp64.
    """

    engine: str
    name: str
    difference: float
    allowed: float
    runs: int = 1
    eager: float | None = None
    norm: float | None = None

    @property
    def ok(self) -> bool:
        return bool(self.difference <= self.allowed)  # NaN is not ok


@dataclass
class Verification:
    """The result of a verification; prints as a table of the worst rows. mismatches: parameters
    that have a gradient, or a nonzero one, in only one of the engines."""

    rows: list[ComparedTensor] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return bool(self.rows) and all(row.ok for row in self.rows) and not self.mismatches

    def __str__(self) -> str:
        lines = [f"{'ok' if self.ok else 'FAILED'}: {len(self.rows)} tensors compared"]
        lines += [f"  DIFFERS {line}" for line in self.mismatches]
        for engine in dict.fromkeys(row.engine for row in self.rows):
            rows = [r for r in self.rows if r.engine == engine]
            bad = [r for r in rows if not r.ok]
            lines.append(f"  against {engine}: {len(rows) - len(bad)} of {len(rows)} agree")
            shown = bad or sorted(rows, key=lambda r: -r.difference / (r.allowed or 1.0))[:1]
            for row in shown[:12]:
                runs = f", over {row.runs} runs" if row.runs > 1 else ""
                lines.append(
                    f"    {'' if row.ok else 'DIFFERS '}{row.name}: {row.difference:.3e} "
                    f"(allowed {row.allowed:.3e}{runs})"
                )
        return "\n".join(lines + [f"  {note}" for note in self.notes])
