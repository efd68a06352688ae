"""The page of a report: one HTML file with its style and charts inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from onward.recipes.report import charts, tables
from onward.recipes.report.run_data import RunData
from onward.recipes.report.tables import ReportTable
from onward.recipes.report.written_files import MARK

_STYLE = """
:root{color-scheme:light dark;--ground:#fbfaf8;--card:#fff;--ink:#1d2327;--faint:#8a9199;
--rule:#e2dfd9;--c0:#1f6f78;--c1:#c2703d;--c2:#7c6f9c;--c3:#8a9a3b;--c4:#b0566b;--c5:#5f7fb5;
--c6:#a08436;--c7:#6d7680}
@media(prefers-color-scheme:dark){:root{--ground:#15191c;--card:#1d2327;--ink:#e6e4df;
--faint:#87909a;--rule:#343b41;--c0:#4fb3bf;--c1:#e2965f;--c2:#ab9cd0;--c3:#b5c463;--c4:#dc8297;
--c5:#8cabdd;--c6:#d0b566;--c7:#9aa4ae}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1180px;padding:20px 16px 48px;background:var(--ground);
color:var(--ink);font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.35rem;margin:0}h2{font-size:1.05rem;margin:0 0 8px}
.lead{font-size:1.6rem;font-weight:600;line-height:1.25;margin:12px 0;color:var(--c0)}
.sub,.note{color:var(--faint);margin:2px 0}.note{color:var(--c1)}
.grid{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr));gap:16px;
margin-top:16px}
section{background:var(--card);border:1px solid var(--rule);border-radius:8px;padding:14px 16px;
min-width:0}
.wide{grid-column:1/-1}
svg{display:block;width:100%;height:auto}svg text{font-family:system-ui,sans-serif!important}
.box{overflow-x:auto;max-height:480px;overflow-y:auto}
table{border-collapse:collapse;font-size:.87rem;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:3px 14px 3px 0;border-bottom:1px solid var(--rule);
vertical-align:top}
td:first-child{white-space:nowrap}td+td:not(.n){min-width:9em}th{white-space:nowrap;color:var(--faint);font-weight:500}
.n{text-align:right;white-space:nowrap}
pre{white-space:pre-wrap;margin:4px 0 12px;font-size:.85rem}
pre b{color:var(--c0);font-weight:600}
"""


def page(run: RunData, refresh: int | None = None) -> str:
    """The page of one run. refresh: seconds after which a browser loads it again."""
    options = run.options
    parts = [f"<h1>{escape(run.name)}</h1>"]
    state = "complete" if run.is_complete else "not complete"
    model = escape(str(options.get("model_name_or_path")))
    parts.append(f'<p class="sub">{model}, {options.get("max_steps")} updates; {state}</p>')
    if len(run.results) == 2 and {"onward", "torch"} == set(run.results):
        lead = tables.headline(run.results["onward"], run.results["torch"], "eager PyTorch")
        parts.append(f'<p class="lead">{escape(lead)}</p>')
    parts += _notes(run)
    sections = [_table(tables.results(run.results))] if run.results else []
    sections += _curves({engine: (run, engine) for engine in run.lines})
    sections += _of_step(run)
    found = None if run.verified is None else tables.certificate(run.verified)
    sections += [] if found is None else [_table(found)]
    sections += _samples(run)
    sections += [_table(table) for table in tables.about(run)]
    return _document(run.name, parts, sections, refresh)


def compared(one: RunData, other: RunData, refresh: int | None = None) -> str:
    """The page of two runs, curves over each other."""
    parts = ["<h1>Two runs compared</h1>"]
    parts += [f'<p class="sub">run {n}: {escape(r.name)}</p>' for n, r in _numbered(one, other)]
    columns: dict[str, Mapping[str, Any]] = {}
    for number, run in _numbered(one, other):
        columns |= {f"run {number}: {engine}": found for engine, found in run.results.items()}
        parts += _notes(run, f"run {number}: ")
    if one.results and other.results:
        first, second = (next(iter(run.results.values())) for run in (one, other))
        lead = tables.headline(second, first, "run 1")
        parts.append(f'<p class="lead">Run 2: {escape(lead)}</p>')
    lines = {
        f"run {number}: {engine}": (run, engine)
        for number, run in _numbered(one, other)
        for engine in run.lines
    }
    sections = [_table(tables.results(columns))] if columns else []
    sections += [_table(tables.differing(one, other)), *_curves(lines)]
    return _document("Two runs compared", parts, sections, refresh)


def _numbered(one: RunData, other: RunData) -> tuple[tuple[int, RunData], ...]:
    return (1, one), (2, other)


def _notes(run: RunData, start: str = "") -> list[str]:
    return [f'<p class="note">{escape(start + note)}</p>' for note in run.notes]


def _document(title: str, parts: list[str], sections: list[str], refresh: int | None) -> str:
    again = "" if refresh is None else f'<meta http-equiv="refresh" content="{refresh}">\n'
    body, made = "\n".join(parts), "\n".join(sections)
    return (
        f'<!doctype html>\n<!-- {MARK} report -->\n<html lang="en">\n<head>\n'
        '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, '
        f'initial-scale=1">\n{again}<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n'
        f'</head>\n<body>\n{body}\n<div class="grid">\n{made}\n</div>\n</body>\n</html>\n'
    )


def _table(table: ReportTable) -> str:
    """A table as a section; columns of numbers are set to the right."""
    columns = range(max(map(len, table.rows), default=0))
    numeric = {i for i in columns if i and table.head and all(_is_number(r[i]) for r in table.rows)}

    def row(cells: Sequence[str], tag: str) -> str:
        made = [
            f"<{tag}{' class=n' if i in numeric else ''}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(cells)
        ]
        return f"<tr>{''.join(made)}</tr>"

    head = f"<thead>{row(table.head, 'th')}</thead>" if table.head else ""
    body = "\n".join(row(cells, "td") for cells in table.rows)
    caption = f'<p class="sub">{escape(table.caption)}</p>' if table.caption else ""
    empty = "" if table.rows else '<p class="sub">none</p>'
    return (
        f'<section><h2>{escape(table.title)}</h2>{caption}{empty}<div class="box" tabindex="0">'
        f"<table>{head}<tbody>\n{body}\n</tbody></table></div></section>"
    )


def _is_number(text: str) -> bool:
    return not text.strip("0123456789.%-+e ")


def _chart(title: str, svg: str, caption: str = "") -> str:
    said = f'<p class="sub">{escape(caption)}</p>' if caption else ""
    return f"<section><h2>{escape(title)}</h2>{said}{svg}</section>"


def _curves(lines: Mapping[str, tuple[RunData, str]]) -> list[str]:
    """The charts of metrics lines, by label."""

    def drawn(key: str) -> list[charts.Line]:
        return [
            (label, [x["step"] for x in found], [x[key] for x in found])
            for label, (run, engine) in lines.items()
            if (found := [x for x in run.lines[engine] if key in x])
        ]

    dots = [
        (f"{label}, evaluation", [x["step"] for x in found], [x["eval_loss"] for x in found])
        for label, (run, engine) in lines.items()
        if (found := run.evaluations.get(engine))
    ]
    if not lines:
        return []
    return [
        _chart("Loss", charts.curves("Loss", "nats per token", drawn("loss"), dots)),
        _chart("Learning rate", charts.curves("Learning rate", "", drawn("learning_rate"))),
        _chart(
            "Throughput", charts.curves("Throughput", "tokens/s", drawn("tokens_per_second"))
        ),
    ]  # fmt: skip


def _of_step(run: RunData) -> list[str]:
    """The charts and tables of the planned step; a note where its file is of another form."""
    step = run.step
    if step is None:
        return []
    try:
        return _step_sections(step)
    except (KeyError, TypeError, IndexError, ValueError, AttributeError):
        return ['<section><p class="note">step.json cannot be shown</p></section>']


def _step_sections(step: Mapping[str, Any]) -> list[str]:
    bands = tables.steady_bands(step)
    made = [
        _chart(
            "Memory timeline of the planned step",
            charts.memory("Memory timeline of the planned step", bands),
        ),
        _table(tables.memory_kinds(step)),
    ]
    measured = tables.seconds_key(step) == "seconds"
    points = [
        (op, one.flops / one.nbytes, one.flops / one.seconds)
        for op, one in tables.work_by_op(step).items()
        if one.flops and one.nbytes and one.seconds
    ][:8]
    rates = step["rates"]
    roof = charts.roofline("Roofline", points, rates["flops_per_second"], rates["bytes_per_second"])
    how = "Measured times" if measured else "Modelled times"
    made.append(_chart("Roofline", roof, f"{how}; the roof is what the planner assumes."))
    made.append(_table(tables.launches(step)))
    rows = tables.row_sets(step)
    made += [] if rows is None else [_table(rows)]
    return [*made, _table(tables.passes(step))]


def _samples(run: RunData) -> list[str]:
    made = [
        f"<pre>{escape(str(one.get('prompt', '')))}<b>{escape(str(one.get('text', '')))}</b></pre>"
        for one in run.samples
    ]
    said = "Greedy continuations, in color, of prompts from the evaluation text."
    title = "<h2>Samples of text</h2>"
    return [f'<section>{title}<p class="sub">{said}</p>{"".join(made)}</section>'] if made else []
