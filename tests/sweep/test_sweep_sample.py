"""A sample of the sweep: classes of many families whose numbers have to be eager's."""

from __future__ import annotations

from pathlib import Path

import classes
import outcome
import page
import pytest
import tiny
import torch
from modules import module_entries, module_fitting

ROWS = page.rows_of(Path(__file__).parent / "rows.jsonl")
WRITTEN = {r["class"]: r for r in ROWS}
EQUAL = [r["class"] for r in ROWS if r["status"] == "equal" and r["seconds"] < 15]
COMMON = (
    "AlbertForMaskedLM", "BartForConditionalGeneration", "BertForMaskedLM", "LlamaForCausalLM",
    "WhisperForCausalLM", "BertForMultipleChoice", "GPT2ForSequenceClassification",
    "RobertaForTokenClassification", "DistilBertForQuestionAnswering", "T5ForConditionalGeneration",
    "torch.nn: Transformer", "torch.nn: MultiheadAttention",
)  # fmt: skip


@pytest.fixture(scope="module")
def entries() -> dict[str, classes.Entry]:
    return {e.name: e for e in (*module_entries(), *classes.entries())}


def test_the_sweep_finds_classes_of_every_kind(entries: dict[str, classes.Entry]) -> None:
    assert set(COMMON) <= set(entries)
    assert {e.task for e in entries.values()} > {"CAUSAL_LM", "CTC", "IMAGE_CLASSIFICATION"}
    assert len(entries) > 500


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", dict.fromkeys((*COMMON, *EQUAL)))
def test_a_class_is_eagers_equal(name: str, entries: dict[str, classes.Entry]) -> None:
    if name not in entries:
        pytest.skip("a class of another version of transformers")
    row = outcome.outcome(entries[name], export=False)
    if row["status"] == "eager-fails":
        pytest.skip(row["reason"])  # a package that is not installed, another version
    written = WRITTEN.get(name, {})
    if row["loss"] == "own" and written.get("note", "").startswith("ImportError"):
        pytest.skip("a loss that needs a package which the table was made without")
    assert (row["status"], row["reason"]) == ("equal", "")
    own = "own" if entries[name].own_loss else "made up"
    assert row["loss"] == (written.get("loss", own) if written.get("note") else own)


def test_wrong_numbers_are_seen() -> None:
    model, maker = module_fitting(module_entries()[0])
    batch, fixed = maker(3, 8)
    whole = outcome.wrapped(model, fixed, maker.form)
    right = tiny.eager(whole, batch, torch.float32)
    assert outcome.difference(right, whole, batch) == ""
    off = {**right, "loss": right["loss"] * 1.001}
    assert outcome.difference(off, whole, batch).startswith("loss off by")
    name = next(n for n in right if n.endswith("weight"))
    assert outcome.difference({n: t for n, t in right.items() if n != name}, whole, batch)


def test_a_class_that_was_equal_may_not_be_lost() -> None:
    held = [{"family": "a", "class": "A", "status": "equal", "reason": "", "export_ok": True}]
    refused = {**held[0], "status": "refused", "reason": "why", "export_ok": None}
    assert page.entered(held, [refused])[1] == ["A: refused, why"]
    rows, lost = page.entered([refused], [{**held[0], "export_ok": None}])
    assert not lost
    assert rows[0]["status"] == "equal"
    assert [r["class"] for r in page.entered(held, [{**refused, "class": "B"}])[0]] == ["A", "B"]


def test_the_page_is_of_the_rows() -> None:
    written = Path(__file__).parents[2] / "docs" / "models.md"
    assert written.read_text() == page.page(ROWS, page.older_rows(Path(__file__).parent)), (
        "fix: make sweep"
    )


def test_causes_share_their_words() -> None:
    reason = "the model cannot be captured: 2 op(s) have no translation:; "
    reason += "conv2d.default at a.b and others; glu.default at c"
    row = {"status": "refused", "reason": reason}
    assert page.causes(row) == [
        "op without a translation: conv2d.default", "op without a translation: glu.default"
    ]  # fmt: skip
    rows = [{"status": "refused", "reason": f"a slice at m.{i}: {i} of u{i}"} for i in range(3)]
    assert len({tuple(page.causes(r)) for r in rows}) == 1
