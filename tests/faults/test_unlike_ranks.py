"""Ranks that are not alike: what differs is named by all of them before the first step. Batches
that only one rank has: a mask more, an id that no table has, NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import unlike_ranks_program
from unlike_ranks_program import NAN_CASES, RANKS, UNLIKE, batch, gpt2

SAID = {
    "options": "the option max_grad_norm on rank 1 (2.0) is not that of rank 0 (1.0); fix: ",
    "precision": "the option mixed_precision on rank 1 ('bf16') is not that of rank 0 ('no'); fix",
    "element_type": "the type of transformer.wte.weight on rank 1 (float64[97,16], trained) is",
    "width": "the type of transformer.wte.weight on rank 1 (float32[97,32], trained) is not that",
    "parameters": "the number of parameters of the optimizer's group 0 on rank 1 (17) is not that",
    "frozen": "the type of transformer.wte.weight on rank 1 (float32[97,16], not trained) is not",
    "ties": "the number of parameters of the optimizer's group 0 on rank 1 (17) is not that of",
    "seed": "the value of transformer.wpe.weight on rank 1 is not that of rank 0; fix: load",
    "optimizer": "the class of the optimizer on rank 1 (AdamW) is not that of rank 0 (SGD)",
    "setting": "momentum of the optimizer's group 0 on rank 1 (0.5) is not that of rank 0 (0.0); ",
    "groups": "the number of the optimizer's groups on rank 1 (2) is not that of rank 0 (1)",
    "version": "the version of onward on rank 1 (0.0.1) is not that of rank 0 (0.0.0); fix: start",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return unlike_ranks_program.run(tmp_path_factory.mktemp("unlike"))


@pytest.mark.slow
def test_what_differs_is_named_before_the_first_step(found: list[dict[str, Any]]) -> None:
    assert SAID.keys() == {each.__name__ for each in UNLIKE}
    for name, said in SAID.items():
        for rank in range(RANKS):
            assert f"OnwardError: {said}" in found[rank][name], found[rank][name]


@pytest.mark.slow
def test_a_mask_on_one_rank_alone_changes_no_number(found: list[dict[str, Any]]) -> None:
    """The step of eager PyTorch with the rows of both ranks."""
    model = gpt2()
    rows = [batch(rank) for rank in range(RANKS)]
    whole = {key: torch.cat([each[key] for each in rows]) for key in ("input_ids", "labels")}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    loss = model(**whole).loss
    loss.backward()
    optimizer.step()
    for each in found:
        assert abs(each["more keys"]["loss"] - float(loss.detach())) < 1e-5
        for have, want in zip(each["more keys"]["weights"], model.parameters(), strict=True):
            torch.testing.assert_close(have, want.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_an_id_that_no_table_has_ends_the_step_of_all(found: list[dict[str, Any]]) -> None:
    assert "RanksApartError: rank 1 has failed in a step that" in found[0]["wrong id"]
    for each in found:
        assert "IndexError: Gather: the index 1000000 is out of range" in each["wrong id"]


@pytest.mark.slow
def test_numbers_of_no_row_are_refused_by_all_ranks_along_tp(found: list[dict[str, Any]]) -> None:
    """Each rank says what one process says, with the number and the limit."""
    assert found[0]["no such rows"] == found[1]["no such rows"]
    assert len(found[0]["no such rows"]) == 12
    for each in found[0]["no such rows"]:
        assert each["rows"] == (each["words"] + 1) // 2, "each rank has half of the table"
        for said in each["said"]:
            assert said.startswith("IndexError: "), each
            assert f"{each['bad']} " in said and f" {each['words']} " in said, each


@pytest.mark.slow
@pytest.mark.parametrize("case", NAN_CASES, ids=str)
def test_nan_on_one_rank_is_skipped_by_all_and_named(
    found: list[dict[str, Any]], case: tuple[int, str]
) -> None:
    for each in found:
        seen = each["NaN"][NAN_CASES.index(case)]
        assert seen["skipped"] and seen["same"] and seen["goes on"]
        assert seen["said"].endswith(
            "update 2 is skipped: on rank 1 the batch 'inputs_embeds' holds NaN"
        )
