"""Two ranks of which one fails, or does something else: all of them say so, nobody waits in vain,
and they go on where nothing has been interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks_go_on_program

pytestmark = pytest.mark.slow

TOGETHER = ", so that the ranks cannot go on together; fix: "


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank has said; they have gone on after each refusal, or the program has failed."""
    return ranks_go_on_program.run(tmp_path_factory.mktemp("going on"))


SAID = {
    "no rows": "every rank has a batch of 0 rows, which is no step; fix: end the epoch when the",
    "rate": "the learning rate or another setting of the optimizer of rank 1 is not that of rank 0",
    "alone": "rank 1 has failed, while rank 0 trains a micro-batch",
    "window": "rank 1 has failed, while rank 0 ends its accumulation window early",
    "origin": "another rank's numbers bring NaN",
    "origin alone": "while rank 0 looks where infinite and NaN numbers come from",
    "others": "rank 1 has read another checkpoint than rank 0 (here: checkpoint-4); fix: name",
    "nowhere": "rank 1 could not read the checkpoint checkpoint-4; fix: see what it says",
    "none": "there is no checkpoint in ",
    "no file": "rank 1 could not take its part of the checkpoint; fix: see what it says",
    "packed": "a planted error",
    "position": f"the number of updates left out of rank 1 is not that of rank 0{TOGETHER}",
    "short": "rank 1 has failed, while rank 0 evaluates a batch",
    "short step": "rank 1 has failed, while rank 0 trains a micro-batch",
    "wrong": "nothing",
    "among": "rank 1 has failed in a step that the ranks make together (ArithmeticError: a planted",
}
OTHERWISE = {  # what rank 1 says, where it is not the same
    "alone": "ValueError: could not convert string to float: 'fast'",
    "window": "ValueError: could not convert string to float: 'fast'",
    "origin": "the batch 'input' holds NaN",
    "origin alone": "rank 0 looks where infinite and NaN numbers come from, while rank 1 ",
    "others": "rank 1 has read another checkpoint than rank 0 (here: checkpoint-5); fix: name",
    "nowhere": "has no checkpoint-4, which rank 0 has read; fix: name the checkpoint's own folder",
    "no file": "registered.0.1.state is a datetime.datetime, and a checkpoint holds",
    "packed": "rank 0 could not write the checkpoint; fix: see what it says",
    "short": "a planted shortage",
    "short step": "a planted shortage",
    "wrong": "the label 99 in row 0 is out of range for 3 classes",
    "among": "a planted error",
}


@pytest.mark.parametrize("name", SAID)
def test_a_refusal_is_told_to_all_ranks(name: str, found: list[dict[str, Any]]) -> None:
    first, second = found
    assert SAID[name] in first[name], first[name]
    assert OTHERWISE.get(name, SAID[name]) in second[name], second[name]


def test_all_ranks_have_the_checkpoint_that_rank_0_still_writes(
    found: list[dict[str, Any]],
) -> None:
    for each in found:
        assert (each["resumed"], each["loaded"]) == ("checkpoint-2", "checkpoint-3")
        assert each["finished"], "the files are there once finish_saves has returned"


def test_a_rank_that_was_interrupted_exchanges_nothing(found: list[dict[str, Any]]) -> None:
    """Half a minute is `ranks_timeout`: nobody has waited for so long."""
    for each in found:
        assert each["seconds"] < 25
        assert len(each["lost"]) == 7
        for said in each["lost"]:
            assert "this rank is no longer where the others are; fix: start the program" in said


def test_every_promise_is_asked_for(found: list[dict[str, Any]]) -> None:
    others = {"resumed", "loaded", "finished", "seconds", "lost"}
    assert found[0].keys() == found[1].keys() == SAID.keys() | others, Path(__file__).name
