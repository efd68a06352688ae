"""docs/gpu.md has the kernels that there are, and is linked from where users look."""

from __future__ import annotations

from gpu_page import HEAD, PAGE, modules, page

from onward.kernels import TRITON

DOCS = PAGE.parent


def test_the_table_is_that_of_the_kernels() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(), "python tests/support/gpu_page.py"
    assert {op for module in modules() for op in module.KERNELS} == set(TRITON)
    table = text.partition(HEAD)[2].partition("\n\n")[0]
    assert all(f"`{op}`" in table for op in TRITON)


def test_pages_lead_to_it() -> None:
    for name in ("index.md", "limits.md", "install.md"):
        assert "(gpu.md)" in (DOCS / name).read_text(encoding="utf-8"), name
    assert "\ngpu\n" in (DOCS / "index.md").read_text(encoding="utf-8")
