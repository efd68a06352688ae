"""Whole models on the rows that are read: loss and every gradient are eager's, whatever the mask.

The plans have room for larger batches, so that launches run on smaller counts than planned.
"""

from __future__ import annotations

import pytest
import tiny_families as families
import torch
from tiny import (
    Tensors,
    batch,
    compiled,
    eager,
    execute,
    execute_packed,
    gpt2,
    packed_gradients,
    plain,
    tokens,
    trained,
)
from tiny_families import CASES, Data, Make, assert_same, of, padded, rms

pytestmark = pytest.mark.usefixtures("captures_kept")

SIZE, LENGTH = 4, 12
MASKS = {
    "right": [12, 7, 3, 9],
    "left": [-12, -7, -3, -9],
    "middle": [12, 0b110111, 0b1011, 0b101101],
    "an empty sequence": [5, 0, 12, 3],
    "one or two tokens": [1, 2, 1, 2],
    "none": [12, 12, 12, 12],
}


def mask_of(kind: str) -> torch.Tensor:
    """`i64[4,12]`: lengths, from the right where negative, bits for holes."""
    place = torch.arange(LENGTH)
    rows = []
    for n in MASKS[kind]:
        if kind == "middle":
            rows.append((n >> (place % 6)) & 1 if n != 12 else torch.ones_like(place))
        else:
            rows.append((place < n).long() if n >= 0 else (place >= LENGTH + n).long())
    return torch.stack(rows)


def masked_batch(kind: str, labels: str = "some") -> Tensors:
    """Labels on real tokens; "anywhere" also on padding, "none" nowhere."""
    ids, mask = tokens(SIZE, LENGTH), mask_of(kind)
    place = torch.arange(SIZE * LENGTH).view(SIZE, LENGTH)
    wanted = (place % 3 == 1) | (place % LENGTH == 0)
    if labels != "anywhere":
        wanted &= mask > 0
    if labels == "none":
        wanted &= False
    return {
        "input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(~wanted, -100)
    }  # fmt: skip


MODELS: dict[str, Make] = {
    "BERT": of("Bert", "MaskedLM", num_hidden_layers=2),
    "GPT-2": lambda: gpt2(0.0, use_cache=False),
    "Llama": of("Llama", "CausalLM", num_hidden_layers=2),
    "RoBERTa": of("Roberta", "MaskedLM"),
}


@pytest.mark.sample(16)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", MODELS)
def test_every_mask(name: str, kind: str) -> None:
    model, data = MODELS[name](), masked_batch(kind)
    found, counts = packed_gradients(model, data)
    assert_same([found], model, [data])
    labelled = data["labels"] != -100
    read = (data["attention_mask"] > 0) & labelled.any(1, keepdim=True)
    if name in ("BERT", "RoBERTa"):
        assert sorted(counts.values()) == sorted([int(labelled.sum()), int(read.sum())])


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", ["right", "middle"])
@pytest.mark.parametrize("name", MODELS)
def test_labels_on_padding_count_as_in_eager(name: str, kind: str) -> None:
    model, data = MODELS[name](), masked_batch(kind, "anywhere")
    assert_same([packed_gradients(model, data)[0]], model, [data])


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_no_label_at_all(name: str) -> None:
    """The mean over nothing is not a number, and no parameter moves: as in eager."""
    model, data = MODELS[name](), masked_batch("right", "none")
    found, counts = packed_gradients(model, data)
    want = eager(model, data, torch.float32)
    assert set(found) == set(want) and not any(counts.values())
    assert found.pop("loss").isnan() and want.pop("loss").isnan()
    assert not any(g.any() for g in want.values()), "eager changed"
    assert not any(g.any() for g in found.values())


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", MODELS)
def test_without_a_mask(name: str) -> None:
    """Only labels say what is read."""
    data = masked_batch("none")
    del data["attention_mask"]
    model = MODELS[name]()
    assert_same([packed_gradients(model, data)[0]], model, [data])


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", CASES)
def test_every_family(name: str) -> None:
    model, data = CASES[name][0](), CASES[name][1]()
    found, counts = packed_gradients(model, data)
    assert_same([found], model, [data])
    # Llama 4 gives each of two experts all rows
    times = 3 if "choices" in name else 2 if "Llama 4" in name else 1
    rows = SIZE * LENGTH * times
    assert counts and all(n <= rows for n in counts.values())


def test_the_users_own_types_and_positions() -> None:
    data = masked_batch("middle")
    data["token_type_ids"] = torch.arange(LENGTH).repeat(SIZE, 1) % 2
    data["position_ids"] = 40 - torch.arange(LENGTH).repeat(SIZE, 1)
    model = of("Bert", "MaskedLM", num_hidden_layers=2)()
    assert_same([packed_gradients(model, data)[0]], model, [data])


@pytest.mark.slow
def test_two_towers() -> None:
    model = families.tiny.ready(families.Towers())
    batches = [families.pairs(seed) for seed in (1, 2, 3, 4)]
    assert_same([packed_gradients(model, data)[0] for data in batches], model, batches)


DROPS = {"hidden_dropout_prob": 0.3, "attention_probs_dropout_prob": 0.3}
DROPPING: dict[str, tuple[Make, Data]] = {
    "BERT": (of("Bert", "MaskedLM", num_hidden_layers=2, **DROPS), lambda: masked_batch("middle")),
    "BERT, class": (
        of("Bert", "SequenceClassification", **DROPS),
        lambda: padded(labels=torch.tensor([0, 1, 1, 0])),
    ),
    "BERT, pretraining": (of("Bert", "PreTraining", **DROPS), CASES["BERT, pretraining"][1]),
    "GPT-2": (lambda: gpt2(0.3, use_cache=False), lambda: masked_batch("left")),
    "T5": (of("T5", "ConditionalGeneration", dropout_rate=0.3), CASES["T5"][1]),
    "Bart": (
        of("Bart", "ConditionalGeneration", dropout=0.3, attention_dropout=0.3),
        CASES["Bart"][1],
    ),
    "BERT, mask of pairs": (
        of("Bert", "MaskedLM", **DROPS), CASES["BERT, mask of bools"][1]
    ),
}  # fmt: skip


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", DROPPING)
def test_dropout_draws_the_masks_of_the_whole_batch(name: str) -> None:
    """With other masks every number would be another; with these only rounding is."""
    make, data_of = DROPPING[name]
    model, data = make(), data_of()
    found, _ = packed_gradients(model, data)
    made = compiled(model, data)
    graph = made.differentiated(trained(made))
    names = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
    want = plain(execute(made, graph, data, names))
    other = plain(execute(made, graph, data, names, seed=torch.tensor([1, 2])))
    assert set(want) == set(found)
    scale = rms([float(g.norm()) for g in want.values()])
    moved = 0
    for key, truth in want.items():
        distance = float((found[key] - truth).norm())
        assert distance <= 2e-5 * float(truth.norm()) + 1e-7 * scale, key
        moved += float((other[key] - truth).norm()) > 1e-2 * float(truth.norm())
    assert moved > len(want) / 2, "another seed must show"


def test_outputs_come_back_with_all_their_rows() -> None:
    """Logits at padding are what eager gives there: only keys are spared."""
    model, data = MODELS["BERT"](), masked_batch("right")
    made = compiled(model, data)
    forward = made.packed(["loss", "output.logits"])
    assert forward is not None
    found, counts = execute_packed(made, forward, data, ["loss", "output.logits"])
    labelled = int((data["labels"] != -100).sum())  # the loss's own rows are counted as ever
    assert set(counts.values()) == {int(data["attention_mask"].sum()), labelled}
    want = model(**data)
    torch.testing.assert_close(found["output.logits"], want.logits.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["loss"], want.loss.detach(), rtol=1e-5, atol=0)


def test_nothing_to_spare_is_left_alone() -> None:
    """Every row is read: no row is counted."""
    data = batch(4, 12)
    assert compiled(gpt2(0.0), data).packed(["loss", "output.logits"]) is None
    del data["labels"]
