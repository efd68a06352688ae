"""Writes the .ipynb of a notebook in Databricks' source format, beside it.

    python to_ipynb.py transformer_tutorial.py

The source is the file to edit; the .ipynb is made of it and has no outputs.
"""

import sys
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

FIRST_LINE = "# Databricks notebook source\n"
BETWEEN_CELLS = "\n# COMMAND ----------\n"
MAGIC = "# MAGIC"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def notebook_of(source: str) -> nbformat.NotebookNode:
    """The cells of a source: `# MAGIC %md` begins text, any other `# MAGIC` is a line of IPython's,
    and the rest is Python."""
    if not source.startswith(FIRST_LINE):
        raise SystemExit(f"the source does not begin with {FIRST_LINE.strip()!r}; fix: add it")
    cells: list[nbformat.NotebookNode] = []
    for number, text in enumerate(source.removeprefix(FIRST_LINE).split(BETWEEN_CELLS)):
        lines = [line.removeprefix(MAGIC).removeprefix(" ") if line.startswith(MAGIC) else line
                 for line in text.strip("\n").split("\n")]  # fmt: skip
        is_markdown = lines[0].split()[:1] == ["%md"]
        if is_markdown:
            lines[0] = lines[0].partition("%md")[2].strip()
        made = (new_markdown_cell if is_markdown else new_code_cell)("\n".join(lines).strip("\n"))
        made["id"] = f"cell-{number}"  # nbformat draws one, which would change with each run
        cells.append(made)
    return new_notebook(cells=cells, metadata={"kernelspec": KERNEL})


def main(path: str) -> None:
    source = Path(path)
    made = notebook_of(source.read_text(encoding="utf-8"))
    nbformat.validate(made)
    source.with_suffix(".ipynb").write_text(nbformat.writes(made) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    main(sys.argv[1])
