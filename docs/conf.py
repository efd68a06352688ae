"""Settings of the documentation site: Sphinx builds it from the Markdown pages of the repository.

The source folder is the repository itself, so that a link from one page to another, to a script or
to a picture is the same link on the site and on a code host: `make docs`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from sphinx import addnodes

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "docs")]

from docstrings import restructured  # noqa: E402  (found by the line above)

import onward  # noqa: E402

project = "Onward"
author = "the Onward authors"
version = release = onward.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "*.md",
    "examples/*.md",
    "examples/**/README.md",
    "benchmarks/results/*.md",
    "tests/README.md",
    "deploy/**/README.md",
]
# Folders that are not looked into, and a file for agents.
exclude_patterns = [
    ".*", "build", "dist", "runs", "src", "AGENTS.md", "**/node_modules", "**/__pycache__",
]  # fmt: skip
source_suffix = {".md": "markdown"}

# ---- Markdown

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = [
    "myst.header",  # the changelog's versions, and pages of results that begin at the second level
    "toc.not_included",  # the tree of contents leaves out pages that others link to
    "ref.python",  # two classes are called Trainer, and signatures write their names alone
    "misc.highlighting_failure",  # excerpts of sources may begin in the middle of a statement
]

# ---- docstrings

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
autodoc_default_options = {"members": True}
python_maximum_signature_line_length = 80
add_module_names = False
toc_object_entries_show_parents = "hide"

# ---- the look

html_theme = "furo"
html_title = "Onward"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "github-dark"
highlight_language = "text"  # of a block that names no language


def unlink_folders(app: Any, tree: Any) -> None:
    """Replaces links to folders of the repository, which are no pages of the site, by their text;
    any other target that is missing is a warning, and so an error."""
    page = Path(app.srcdir) / app.env.docname
    for link in list(tree.findall(addnodes.pending_xref)):
        target = str(link.get("reftarget", "")).partition("#")[0]
        if target and link.get("reftype") == "myst" and (page.parent / target).is_dir():
            link.replace_self(link.children)


def plain_prose(app: Any, kind: str, name: str, of: Any, options: Any, lines: list[str]) -> None:
    """Turns a docstring of the house style into what Sphinx reads; it changes `lines`."""
    lines[:] = restructured(lines)


def write_start(app: Any, failure: Exception | None) -> None:
    """Writes the page at the top of the site, which leads to the start page of the docs."""
    if failure is None and app.builder.name == "html":
        start = '<!doctype html><meta charset="utf-8"><title>Onward</title>'
        start += '<meta http-equiv="refresh" content="0; url=docs/index.html">'
        (Path(app.outdir) / "index.html").write_text(
            f'{start}<a href="docs/index.html">Onward</a>\n', encoding="utf-8"
        )


def setup(app: Any) -> None:
    app.connect("doctree-read", unlink_folders)
    app.connect("autodoc-process-docstring", plain_prose)
    app.connect("build-finished", write_start)
