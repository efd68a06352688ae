"""What `explain` says of rows that are kept: each reason names an op of a module that exists, or an
output; and where padding is computed there is a reason."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
import transformers as hf
from pooling import POOLINGS, Tower, batch
from tiny_families import BERT, CASES
from torch import Tensor, nn

import onward

LEAST = torch.finfo(torch.float32).min


def _explained(model: nn.Module, given: Any) -> Any:
    return onward.Trainer(model, onward.optim.SGD(lr=0.1)).explain(given)


def _assert_named(found: Any, model: nn.Module) -> None:
    modules = {"(top)", *(path for path, _ in model.named_modules() if path)}
    for kept in found.kept:
        op, _, said = kept.why.partition(" at ")
        assert op.isidentifier(), kept.why
        place, _, reason = said.partition(": ")
        assert place in modules, kept.why
        assert reason, kept.why
    assert bool(found.kept) == (found.together > 0), str(found)


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", CASES)
def test_padding_of_families_is_computed_for_a_reason(name: str) -> None:
    make, data = CASES[name]
    model, given = make(), data()
    found = _explained(model, given)
    _assert_named(found, model)
    mask = given.get("attention_mask")
    if mask is None or mask.dim() != 2:
        return
    real = int((mask != 0).sum())
    padded = any(s.count > real and s.total == mask.numel() for s in found.sets)
    assert bool(found.kept) == (padded or bool(found.whole)), str(found)


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", POOLINGS)
def test_padding_of_poolings_is_computed_for_a_reason(name: str) -> None:
    model, given = Tower(POOLINGS[name].make), batch()
    found = _explained(model, given)
    _assert_named(found, model)
    real = int(given["mask"].sum())
    padded = any(s.count > real and s.total == given["mask"].numel() for s in found.sets)
    assert bool(found.kept) == (padded or bool(found.whole)), str(found)


class WithAddedMask(nn.Module):
    """BERT and the first token, with a mask that is added to scores, as made by hand."""

    def __init__(self, low: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.low, self.head = low, nn.Linear(BERT["hidden_size"], 3)
        self.bert = hf.BertModel(hf.BertConfig(**BERT), add_pooling_layer=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        added = (1.0 - attention_mask[:, None, None, :].to(self.head.weight.dtype)) * self.low
        states = self.bert(input_ids=input_ids, attention_mask=added).last_hidden_state
        return F.cross_entropy(self.head(states[:, 0]), labels)


@pytest.mark.parametrize(("low", "keys"), [(-10000.0, 48), (-1e9, 48), (LEAST, 27)])
def test_a_mask_that_may_be_outweighed_hides_no_key_and_is_named(low: float, keys: int) -> None:
    given = tiny.batch(4, 12, "right")
    given["attention_mask"][1:, 5:] = 0
    given["labels"] = torch.tensor([0, 1, 2, 0])
    model = tiny.ready(WithAddedMask(low))
    found = _explained(model, given)
    assert {s.count for s in found.sets if s.total == 48} == {4, keys}
    said = [k.why for k in found.kept]
    if low == LEAST:
        assert not said
    else:
        (why,) = said
        where = "FlashAttention at bert.encoder.layer.0.attention.self"
        assert why.startswith(f"{where}: its mask hides keys by {low:g}, which a score may"), why
    ours, counts = tiny.packed_gradients(model, given)
    assert keys in counts.values() or keys == 48
    want, exact = (tiny.eager(model, given, t) for t in (torch.float32, torch.float64))
    assert not tiny.differing_most(ours, want, exact)
