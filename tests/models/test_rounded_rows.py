"""Sets of rows that are rounded up, as on targets that record launches: the loss and every gradient
stay eager's, dropout draws the same masks, and batches share few sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from row_programs import batch as program_batch
from row_programs import program, wrong_numbers
from test_row_demand import LENGTH, MASKS, MODELS, SIZE, masked_batch
from tiny import gpt2, packed_gradients, tokens
from tiny_families import CASES, assert_same

import onward
from onward.kernels import Target
from onward.rewrite.rows import packer

pytestmark = pytest.mark.usefixtures("captures_kept")


@pytest.fixture(autouse=True, params=[4, 16])
def rounded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Rounds on this processor too. Coarse steps leave many rows in addition."""
    monkeypatch.setattr(Target, "records", property(lambda self: True))
    monkeypatch.setattr(packer, "_STEPS", request.param)
    monkeypatch.setenv("ONWARD_CACHE", "")
    return request.param


@pytest.mark.sample(12)
@pytest.mark.parametrize("labels", ["some", "anywhere"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_eagers(name: str, kind: str, labels: str, rounded: int) -> None:
    model, data = MODELS[name](), masked_batch(kind, labels)
    found, counts = packed_gradients(model, data)
    assert_same([found], model, [data])
    step = max(1, SIZE * LENGTH // rounded)
    assert counts and all(n % step == 0 or n == SIZE * LENGTH for n in counts.values())


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", CASES)
def test_families(name: str) -> None:
    model, data = CASES[name][0](), CASES[name][1]()
    assert_same([packed_gradients(model, data)[0]], model, [data])


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", [3, 17, 26, 33, 58])
def test_random_programs(seed: int) -> None:
    made = program(seed)
    kinds = ("ragged", "holes", "full", "empty")
    data = [program_batch(seed + n, kind) for n, kind in enumerate(kinds)]
    assert not wrong_numbers(made, data), str(made)


def losses(
    labels: list[int], records: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[float], set[Any]]:
    """Losses of GPT-2 with dropout over batches with so many labels, and the counts of rows."""
    monkeypatch.setattr(Target, "records", property(lambda self: records))
    model = gpt2(0.3, use_cache=False)
    trainer = onward.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.05), options={"seed": 3}
    )
    found, sizes = [], set[Any]()
    for n in labels:
        ids = tokens(SIZE, LENGTH)
        wanted = torch.arange(SIZE * LENGTH).view(SIZE, LENGTH) % LENGTH >= LENGTH - n
        labelled = ids.masked_fill(~wanted, -100)
        found.append(float(trainer.train_step(input_ids=ids, labels=labelled).loss))
        sizes.add(tuple(sorted(trainer.report()["rows"]["counts"].items())))
    return found, sizes


def test_dropout_and_the_number_of_sizes(rounded: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks depend on logical rows, so that exact and rounded sets give the same losses."""
    counts = [2, 3, 4, 3, 2, 5, 4]
    exact, many = losses(counts, False, monkeypatch)
    found, few = losses(counts, True, monkeypatch)
    assert found == pytest.approx(exact, rel=2e-5)
    assert len(few) <= len(many)
    if rounded == 4:
        assert len(few) < len(many)
