"""docs/models.md from the lines of a sweep: what trains, what does not, and why.

`python tests/sweep/page.py FILE.jsonl [--out docs/models.md]`; without `--out` it is printed.
`--rows tests/sweep/rows.jsonl` holds the outcomes so far: those of the file are entered, unless a
class that was equal no longer is, which ends with exit code 1 and nothing written. A sweep of
another version of transformers has rows of its own, `rows-4.57.jsonl`, and a section of the page.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]
STATUSES = ("equal", "refused", "WRONG", "sites", "CRASH", "timeout", "eager-fails")
KINDS = ("text", "vision", "speech", "multimodal", "other")
MEANING = {
    "equal": "loss and every gradient are eager's, for a second batch too",
    "refused": "Onward says in one line why not",
    "WRONG": "numbers that are not eager's",
    "sites": "equal, but with dropout on it is refused, or has other sites than the forward",
    "CRASH": "an error that is not a refusal",
    "timeout": "not done within the limit of the sweep",
    "eager-fails": "the tiny model does not train in eager PyTorch here; says nothing of Onward",
}
# Reasons that name one place or number each -> the words that stand for all of them.
SHORT: tuple[tuple[str, str], ...] = (
    (r"requires the (\w+) library", r"needs the package \1"),
    (r"No module named '(\w+)'", r"needs the package \1"),
    (r"Training is not implemented", "transformers has not implemented the loss"),
    (r"([\d,]+) parameters with the small configuration", "no small configuration found"),
    (r"validate_architecture|validator", "no small configuration found"),
    (r"random numbers in the forward", "random numbers in the forward"),
    (r"not finite", "a loss or gradient that is not finite"),
    (r"no gradients", "no gradients"),
)  # fmt: skip


def rows_of(file: Path) -> list[Row]:
    """The last line of each class."""
    last: dict[str, Row] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        last[row["class"]] = row
    return sorted(last.values(), key=lambda r: (r["family"], r["class"]))


def entered(held: list[Row], found: list[Row]) -> tuple[list[Row], list[str]]:
    """The rows so far with what was found in their place, and the classes that were equal and are
    so no longer. What a sweep without torch.export left open is as it was."""
    rows = {r["class"]: r for r in held}
    lost = []
    for row in found:
        before = rows.get(row["class"], {})
        if before.get("status") == "equal" != row["status"]:
            lost.append(f"{row['class']}: {row['status']}, {row['reason']}")
        new = {**row, "reason": str(row["reason"])[:300]}
        if new["export_ok"] is None:
            new |= {k: before.get(k) for k in ("export_ok", "export_reason") if k in before}
        rows[row["class"]] = new
    return sorted(rows.values(), key=lambda r: (r["family"], r["class"])), lost


def causes(row: Row) -> list[str]:
    """Why the class is not equal, in words that other classes share."""
    reason, status = str(row["reason"]), row["status"]
    if status == "equal":
        return []
    if status == "timeout":
        return [f"time limit, {reason}"]
    if status == "WRONG":
        return ["WRONG: " + re.sub(r"[\d.e+-]+", "#", reason.split(" off by")[0])[:80]]
    reason = re.sub(r"^second batch, [\dx]+: ", "", reason)
    if "have no translation" in reason:
        ops = re.findall(r"(?:^|; )([\w:.]+)(?= at |;|$)", reason.partition("translation:")[2])
        return [f"op without a translation: {op}" for op in dict.fromkeys(ops)] or [reason]
    if status == "eager-fails":
        for pattern, words in SHORT:
            if found := re.search(pattern, reason):
                return [found.expand(words) if "\\" in words else words]
        return ["inputs or configuration not found by the sweep"]
    return [normal(reason)]


def normal(reason: str) -> str:
    """Without names of places, numbers and what stands in quotes."""
    text = reason.removeprefix("the model cannot be captured: ")
    text = re.sub(r" at [\w.]+(?=[:;, ]|$)", "", text)
    text = re.sub(r"\b[a-z_]\w*(\.\w+){2,}", "<name>", text)
    text = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "'...'", text)
    text = re.sub(r"\b[us]\d+\b", "<size>", text)
    text = re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "#", text)
    return text.split("; fix:")[0][:140].strip()


def table(head: list[str], body: list[list[Any]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(str(c).replace("|", "\\|") for c in row) + " |" for row in body]
    return "\n".join(lines)


def by_kind(rows: list[Row]) -> str:
    counts = collections.Counter((r["kind"], r["status"]) for r in rows)
    body: list[list[Any]] = [
        [kind, *(counts[kind, s] or "" for s in STATUSES),
         sum(counts[kind, s] for s in STATUSES)]
        for kind in KINDS
    ]  # fmt: skip
    total = [sum(counts[k, s] for k in KINDS) for s in STATUSES]
    body.append(["**all**", *total, sum(total)])
    return table(["kind", *STATUSES, "classes"], body)


def by_family(rows: list[Row]) -> str:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["family"], []).append(row)
    body = []
    for family, members in groups.items():
        counts = collections.Counter(r["status"] for r in members)
        kinds = ", ".join(k for k in KINDS if any(r["kind"] == k for r in members))
        why = list(dict.fromkeys(c for r in members for c in causes(r)))
        shown = "; ".join(why[:3]) + (f"; and {len(why) - 3} more" if len(why) > 3 else "")
        done = [n for n in STATUSES[1:] if counts[n]]
        rest = ", ".join(f"{counts[n]} {n}" for n in done)
        body.append([family, kinds, f"{counts['equal']} of {len(members)}", rest, shown])
    return table(["family", "kinds", "equal", "others", "why"], body)


def by_cause(rows: list[Row], statuses: tuple[str, ...]) -> list[list[Any]]:
    """Each cause: how many classes have it, how many have no other, and some of them."""
    have: dict[str, list[Row]] = {}
    for row in rows:
        if row["status"] in statuses:
            for cause in causes(row):
                have.setdefault(cause, []).append(row)
    body = []
    for cause, members in sorted(have.items(), key=lambda item: -len(item[1])):
        alone = sum(causes(r) == [cause] for r in members)
        names = ", ".join(r["class"] for r in members[:3])
        body.append([cause, len(members), alone, names])
    return body


def older_rows(folder: Path) -> dict[str, list[Row]]:
    """The rows of other versions of transformers, by version."""
    files = sorted(folder.glob("rows-*.jsonl"))
    return {file.stem.removeprefix("rows-"): rows_of(file) for file in files}


def older(version: str, rows: list[Row], newest: list[Row]) -> str:
    """The section of another version."""
    now = {r["class"]: r["status"] for r in newest}
    lost = [r for r in rows if r["status"] not in ("equal", "eager-fails")]
    behind = [r for r in lost if now.get(r["class"]) == "equal"]
    head = ["cause", "classes", "with no other cause", "such as"]
    return f"""## transformers {version}

One class of each family, by `tests/sweep/run.py --one-per-family` where that version is installed.
Of the {len(lost)} that are not equal {len(behind)} are with the newest version, whose code differs.

{by_kind(rows)}

{table(head, by_cause(rows, STATUSES[1:-1]))}
"""


def page(rows: list[Row], others: dict[str, list[Row]]) -> str:
    families = {r["family"] for r in rows}
    captures = collections.Counter(r["second_capture"] for r in rows if r["status"] == "equal")
    exports = collections.Counter(r["export_ok"] for r in rows)
    made_up = sum(r["loss"] == "made up" for r in rows)
    head = ["cause", "classes", "with no other cause", "such as"]
    meaning = "\n".join(f"- **{k}**: {v}" for k, v in MEANING.items())
    return f"""# Models

{len(rows)} classes of {len(families)} families of transformers, each as the smallest model that its
configuration allows, dropout off, against eager PyTorch: the loss and the gradient of every
parameter, for a batch and for one of another size. `make sweep` tries them again and writes this
page.

{by_kind(rows)}

{meaning}

Of the classes that are equal {captures[False]} took the second batch without another capture,
{captures[True]} captured again, {captures[None]} have one size of batch. torch.export itself takes
{exports[True]} of all classes with fixed sizes and refuses {exports[False]}. The loss of {made_up}
classes is made up of their results: their forward has none that can be asked for here.

## What remains, by cause

{table(head, by_cause(rows, ("refused", "WRONG", "sites", "CRASH", "timeout")))}

## Not tried, by cause

{table(head, by_cause(rows, ("eager-fails",)))}

{"".join(older(version, found, rows) + chr(10) for version, found in others.items())}\
## Families

{by_family(rows)}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", type=Path)
    options = parser.parse_args()
    rows = rows_of(options.file)
    if options.rows:
        held = rows_of(options.rows) if options.rows.exists() else []
        rows, lost = entered(held, rows)
        if lost:
            print("no longer equal:", *lost, sep="\n  ", file=sys.stderr)
            return 1
        lines = [json.dumps(row, sort_keys=True) + "\n" for row in rows]
        options.rows.write_text("".join(lines))
    folder = options.rows.parent if options.rows else Path(__file__).parent
    if options.rows and options.rows.stem != "rows":  # of another version
        rows = rows_of(folder / "rows.jsonl")
    text = page(rows, older_rows(folder))
    if options.out:
        options.out.write_text(text)
    else:
        print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
