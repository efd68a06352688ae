"""An explanation as text, as JSON and as a page: the same facts, and nothing from elsewhere."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest
import torch
from tiny import batch, bert, gpt2

import onward
from onward.explanation import RowReport, StepExplanation
from onward.explanation.facts import ARENA, KINDS, RegionFacts
from onward.explanation.memory_drawing import COLORS, HEIGHT, TOP, svg
from onward.explanation.page import page
from onward.explanation.text import Unit

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def found() -> StepExplanation:
    """With everything in it that an explanation may have."""
    model = bert(layers=1)
    made = onward.explain(
        model, batch(4, 12, "right"), memory="2MB", batch_sizes=(1, 8), profile=True,
        optimizer=torch.optim.AdamW(model.parameters()),
    )  # fmt: skip
    return dataclasses.replace(
        made,
        notes=("a < note",),
        regions=(RegionFacts("encoder.<odd>", "no form & no op", "", 0.25, 0.125),),
        near_misses=({"pass": "p", "op": "Fused", "reason": "too <odd>", "modules": ["a", "b"]},),
    )


@pytest.fixture(scope="module")
def refused() -> StepExplanation:
    return StepExplanation("Model", "module", captured=False, reasons=("an op <odd> at a.b",))


def test_json_holds_every_fact(found: StepExplanation) -> None:
    told = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert set(told) == {f.name for f in dataclasses.fields(found)} | {"launch_count"}
    assert found.memory is not None and found.largest is not None and found.rows is not None
    assert told["memory"]["total"] == found.memory.total == sum(told["memory"]["kinds"].values())
    assert set(told["memory"]["most"]) == set(KINDS)
    assert told["largest"]["batch_size"] == found.largest.batch_size
    assert told["rows"]["sets"][0]["rows"] == found.rows.sets[0].count
    assert [c["ops"] for c in told["changes"]] == [dict(c.ops) for c in found.changes]
    assert told["regions"][0]["share"] == 0.125 and told["launch_count"] == found.launch_count


def test_text_has_a_line_for_every_fact(found: StepExplanation) -> None:
    lines = str(found).splitlines()
    assert all(line.isprintable() and line.isascii() for line in lines)
    assert found.memory is not None and found.largest is not None
    for kind in KINDS:
        shown = [line for line in lines if line.startswith(f"  {kind:<14}")]
        assert len(shown) == bool(found.memory.most(kind))
        if shown:
            assert f"{found.memory.kinds[kind] / 2**10:.2f}" in shown[0]
    [total] = [line for line in lines if line.startswith("  total")]
    assert f"{found.memory.total / 2**10:.2f}" in total
    for change in found.changes:
        if change.edits:
            [line] = [x for x in lines if f" {change.name} " in x and f" {change.before} -> " in x]
            assert f"{change.edits}" in line and f"-> {change.after}" in line
    for item in found.launches:
        words = [item.op, str(item.forward), str(item.backward)]
        assert any(line.split()[:3] == words for line in lines)
    assert any(f": {found.largest.batch_size}, with " in line for line in lines)
    assert "  note: a < note" in lines
    assert (
        "  encoder.<odd> runs in eager PyTorch, 12.5% of the step's time: no form & no op" in lines
    )
    assert "not fused by p: Fused at a and 1 more: too <odd>" in lines
    assert str(found.rows) in str(found)


def test_what_runs_in_eager_is_all_there_is_to_say(refused: StepExplanation) -> None:
    assert str(refused).splitlines()[2:] == [
        "captured: no, it runs in eager PyTorch", "  because an op <odd> at a.b",
    ]  # fmt: skip
    assert repr(refused) == "StepExplanation(Model: runs in eager PyTorch)"
    assert "an op &lt;odd&gt; at a.b" in page(refused)


def test_repr_is_one_short_line(found: StepExplanation) -> None:
    assert repr(found).startswith("StepExplanation(BertForMaskedLM, module: ")
    assert len(repr(found)) < 120 and "\n" not in repr(found)


def test_a_page_is_whole_and_well_formed(found: StepExplanation) -> None:
    document = page(found)
    root = xml.fromstring(document.partition("\n")[2])
    text = "".join(root.itertext())
    assert found.memory is not None and found.largest is not None
    for fact in (
        f"{found.memory.total / 2**10:.2f}", f": {found.largest.batch_size}, with ", "too <odd>",
        "no form & no op", "FlashAttention", "AddLayerNormalization",
        *(kind for kind in KINDS if found.memory.most(kind)),
    ):  # fmt: skip
        assert fact in text, fact
    # nothing is loaded from elsewhere, and nothing runs
    active = r"<(script|link|img|iframe|object|embed)|\b(src|href|on\w+)=|url\(|@import"
    assert not re.search(active, document)
    assert set(re.findall(r"https?://[^\"]+", document)) == {"http://www.w3.org/2000/svg"}
    assert len(list(root.iter(f"{SVG}svg"))) == 2, "the memory, and the rows"
    fragment = xml.fromstring(f"<div>{found._repr_html_()}</div>")
    assert "".join(fragment.itertext()).strip() in text


def test_the_drawing_reaches_as_high_as_the_bytes(found: StepExplanation) -> None:
    memory = found.memory
    assert memory is not None
    root = xml.fromstring(svg(memory))
    bands = {e.findtext(f"{SVG}title"): e.get("points", "") for e in root.iter(f"{SVG}polygon")}
    assert set(bands) <= set(COLORS) and set(COLORS) == set(KINDS)
    top = min(float(point.split(",")[1]) for text in bands.values() for point in text.split())
    without = memory.total - memory.kinds["gaps"] - memory.kinds["workspace"]
    expected = TOP + HEIGHT * (1 - without / memory.total)
    assert top == pytest.approx(expected, abs=0.2)
    for kind in ARENA:
        assert (kind in bands) == bool(memory.most(kind))


@pytest.mark.parametrize(("nbytes", "text"), [(4096, "4.00 KiB"), (8 << 20, "8.00 MiB")])
def test_units(nbytes: int, text: str) -> None:
    assert Unit.of(nbytes).named(nbytes) == text


def test_what_is_said_of_rows_can_be_read_of_the_whole(tmp_path: Path) -> None:
    """`trainer.explain` gave the rows alone once: what was read of those is there still."""
    found = onward.Trainer(gpt2(layers=1), onward.optim.AdamW()).explain(batch(4, 12, "right"))
    rows, told = found.rows, json.loads(json.dumps(found.as_dict()))["rows"]
    assert isinstance(found, StepExplanation) and isinstance(rows, RowReport)
    assert told["arithmetic_done"] == found.share and told["packed"] == found.packed
    assert [s["rows"] for s in told["sets"]] == [s.count for s in found.sets]
    for name in ("sets", "whole", "kept", "done", "everything", "packed", "together", "share"):
        assert getattr(found, name) is getattr(rows, name) or getattr(found, name) == getattr(
            rows, name
        )
    assert found.save(tmp_path / "rows.svg").read_text() == found.svg() == rows.svg()


def test_a_page_is_saved_by_the_ending_of_its_file(found: StepExplanation, tmp_path: Path) -> None:
    assert found.save(tmp_path / "step.html").read_text() == page(found)


def test_nothing_is_said_of_the_rows_of_what_is_not_captured(refused: StepExplanation) -> None:
    with pytest.raises(onward.CaptureError, match=r"no rows are known: an op <odd> at a\.b"):
        _ = refused.share
