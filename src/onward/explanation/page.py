"""Shows an explanation as one self-contained HTML page: no script, font or picture from
elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape

from onward.explanation import memory_drawing, text
from onward.explanation.facts import KINDS, StepFacts, StepMemory

_STYLE = """
body { font: 14px/1.45 sans-serif; color: #222; background: #fff; margin: 2em auto;
  max-width: 1010px; padding: 0 1em; }
table { border-collapse: collapse; margin: 0.4em 0; }
td, th { padding: 0.15em 0.8em 0.15em 0; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
th { border-bottom: 1px solid #999; }
code, pre { font: 12px/1.4 monospace; }
svg { max-width: 100%; height: auto; }
h2 { margin-top: 1.6em; font-size: 1.15em; }
.quiet { color: #666; }
"""
Row = Sequence[object]  # numbers are aligned to the right


def page(found: StepFacts) -> str:
    """The whole HTML document of an explanation."""
    title = escape(text.headline(found))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8"/>\n'
        f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"{body(found)}\n</body>\n</html>\n"
    )


def body(found: StepFacts) -> str:
    """The content of the document, which notebooks show too."""
    return "\n".join(_sections(found))


def _sections(found: StepFacts) -> Iterator[str]:
    yield f"<h1>{escape(text.headline(found))}</h1>"
    first, *more = text.capture_lines(found)
    yield f"<p>{escape(first)}</p>" + _list(line.strip() for line in more)
    if not found.captured:
        return
    if found.memory is not None:
        yield "<h2>Memory</h2>"
        yield _memory(found.memory)
        yield memory_drawing.svg(found.memory)
        yield '<p class="quiet">Not counted:</p>' + _list(found.memory.not_counted)
    if found.time is not None:
        yield f"<h2>Time on one {escape(found.gpu)}</h2>"
        yield f"<pre>{escape(chr(10).join(text.time_lines(found.time)))}</pre>"
    if found.sizes:
        yield "<h2>Other batch sizes</h2>"
        unit = text.Unit.of(max(s.nbytes or 0 for s in found.sizes))
        sizes = [
            (s.batch_size, "" if s.nbytes is None else unit.text(s.nbytes), s.reason)
            for s in found.sizes
        ]
        yield _table(("batch size", unit.name, ""), sizes)
    if found.largest is not None:
        yield f"<p>{escape(text.largest_line(found.largest))}</p>"
    if found.rows is not None:
        yield "<h2>Rows</h2>"
        yield found.rows.svg()
    yield from _graph(found)
    yield from _launches(found)


def _memory(memory: StepMemory) -> str:
    unit = text.Unit.of(memory.total)
    rows: list[Row] = [
        (kind, unit.text(memory.kinds[kind]), unit.text(memory.most(kind)), meaning)
        for kind, meaning in KINDS.items()
        if memory.most(kind)
    ]
    rows.append(("total", unit.text(memory.total), "", f"predicted, at launch {memory.fullest}"))
    return _table(("kind", f"{unit.name} at the peak", "at most", ""), rows)


def _graph(found: StepFacts) -> Iterator[str]:
    yield "<h2>Passes</h2>"
    rows: list[Row] = [
        (
            f"{c.stage} {c.name}".strip(),
            "" if c.edits is None else c.edits,
            c.before,
            c.after,
            ", ".join(f"{n:+d} {op}" for op, n in c.ops.items()),
        )
        for c in found.changes
    ]
    yield _table(("pass", "edits", "nodes before", "after", "ops"), rows)
    if found.near_misses:
        yield "<h2>Not fused</h2>"
        misses: list[Row] = [
            (m["op"], m["pass"], m["reason"], ", ".join(m["modules"])) for m in found.near_misses
        ]
        yield _table(("op", "pass", "reason", "modules"), misses)


def _launches(found: StepFacts) -> Iterator[str]:
    yield f"<h2>{found.launch_count} launches</h2>"
    whole = sum(item.seconds or 0.0 for item in found.launches)
    rows: list[Row] = []
    for item in found.launches:
        timed: list[object] = []
        if whole and item.seconds is not None:
            timed = [f"{1e3 * item.seconds:.3f}", f"{item.seconds / whole:.1%}"]
        rows.append([item.op, item.forward, item.backward, *timed])
    columns = ["op", "forward", "backward", *(["ms", "share"] if whole else [])]
    yield _table(columns, rows)


def _table(columns: Sequence[str], rows: Iterable[Row]) -> str:
    lines = [_row("th", columns, rows := list(rows))]
    lines += [_row("td", row, rows) for row in rows]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _row(tag: str, cells: Sequence[object], rows: Sequence[Row]) -> str:
    made = []
    for i, cell in enumerate(cells):
        numbers = [row[i] for row in rows if i < len(row) and row[i] != ""]
        right = bool(numbers) and all(map(_is_number, numbers))
        style = ' class="n"' if right else ""
        made.append(f"<{tag}{style}>{escape(str(cell))}</{tag}>")
    return f"<tr>{''.join(made)}</tr>"


def _is_number(cell: object) -> bool:
    return isinstance(cell, int) or str(cell).replace(".", "").rstrip("%").isdigit()


def _list(lines: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


__all__ = ["body", "page"]
