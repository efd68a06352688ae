"""Rows that a boolean mask chooses: eager's numbers, or a refusal in one line."""

from __future__ import annotations

import pytest
import tiny
import torch
import torch.nn.functional as F
from chosen_rows import PROGRAMS, REFUSED, Choosing, batch
from row_programs import CLASSES, WORDS, wrong_numbers
from torch import Tensor, nn

from onward.errors import OnwardError

KINDS = ("ragged", "holes", "all", "one")


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_are_eagers(name: str) -> None:
    """Numbers equal eager's with all rows and with those that are read; one capture serves every
    count."""
    model, data = Choosing(PROGRAMS[name]), [batch(kind) for kind in KINDS]
    for given, found in zip(data, tiny.gradients_of(model, data), strict=True):
        want, exact = (tiny.eager(model, given, t) for t in (torch.float32, torch.float64))
        wrong = tiny.differing_most(found, want, exact)
        assert not wrong, wrong
    assert not (wrong := wrong_numbers(model, data)), "\n".join(wrong)


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_rows_is_refused(name: str) -> None:
    program, message = REFUSED[name]
    with pytest.raises(OnwardError, match=message) as found:
        tiny.compiled(Choosing(program), batch("ragged"))
    assert "\n" not in str(found.value)
    assert "fix: " in str(found.value)


class Selected(nn.Module):
    """A model that returns logits of labelled tokens alone, as those with sparse prediction do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 4), nn.Linear(4, CLASSES)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        if labels is None:
            return {"logits": self.head(self.words(ids)[ids > 3])}
        logits = self.head(self.words(ids)[labels != -100])
        return {"loss": F.cross_entropy(logits, labels[labels != -100]), "logits": logits}


def test_chosen_rows_are_no_output_and_this_is_said() -> None:
    data = {k: batch("ragged")[k] for k in ("ids", "labels")}
    made = tiny.compiled(Selected(), data)
    assert [*made.forward.outputs] == ["loss"]
    assert "logits is left out of the outputs" in " ".join(made.captured.notes)
    with pytest.raises(OnwardError, match=r"the model returns logits, rows .*; fix: return all"):
        tiny.compiled(Selected(), {"ids": data["ids"]}, want_loss=False)


def test_no_row_at_all_is_not_a_number_as_in_eager() -> None:
    given = batch("ragged")
    model = Choosing(PROGRAMS["head"])
    (some, none) = tiny.gradients_of(
        model, [given, {**given, "labels": torch.full_like(given["labels"], -100)}]
    )
    assert some["loss"].isfinite() and none["loss"].isnan()
    assert model(**{**given, "labels": torch.full_like(given["labels"], -100)}).isnan()


@pytest.mark.parametrize(
    ("name", "rows"), [("head", 5), ("layers of rows", 9), ("unpadded", 5), ("where", 9)]
)
def test_rows_that_are_not_chosen_are_not_computed(name: str, rows: int) -> None:
    """The batch has 15 tokens, of which 9 are real and 5 have labels."""
    _, counts = tiny.packed_gradients(Choosing(PROGRAMS[name]), batch("ragged"))
    assert {*counts.values()} == {rows}
