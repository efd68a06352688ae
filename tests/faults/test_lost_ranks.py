"""A rank that is killed, stopped, hung or failed: the others end by one error that names it, what
it does, and what they waited for. Each process ends by itself, as a program does that catches
nothing; the run hangs in this test where one does not."""

from __future__ import annotations

import re
from pathlib import Path

import lost_ranks_program
import pytest
from lost_ranks_program import LOSSES

ENDED, STOPPED = (
    r"rank {rank} has ended \(process {pid} on ",
    r"rank {rank} is stopped \(process {pid} on ",
)
HUNG = (
    r"rank {rank} does not come \(process {pid} on .*\): for \d+ s it has been at "
    r"lost_ranks_program.py:\d+ in waits_for_a_file_that_never_comes, called at "
)
SAID = {  # of the rank that is lost, and what the others do
    "killed before the first step": (ENDED, "compares its model and options after 0 updates"),
    "killed between steps": (ENDED, "after 2 updates"),
    "killed in a step": (ENDED, "is in exchange "),
    "killed with the store": (ENDED, "after 2 updates"),
    "killed in a save": (ENDED, "saves a checkpoint after "),
    "killed while it writes": (ENDED, "saves a checkpoint after 2 updates"),
    "stopped before the first step": (STOPPED, "compares its model and options after 0 updates"),
    "stopped in a step": (STOPPED, "is in exchange "),
    "stopped with torch's timeout": (STOPPED, "is in exchange "),
    "stopped with the store": (STOPPED, "after 2 updates"),
    "hung in its loader": (HUNG, "after 2 updates"),
    "hung in an evaluation": (HUNG, "after 2 updates"),
    "holds Python's lock": (
        r"rank {rank} does not come, and nothing is heard of it \(process {pid} on ",
        "after 2 updates",
    ),
    "failed in a step": (
        r"rank {rank} has failed in a step that the ranks make together \(ArithmeticError: a pl",
        r"is in exchange 3 of 3 along dp_replicate, of the loss, after 2 updates",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", LOSSES)
def test_the_others_end_and_name_the_rank_that_is_lost(name: str, tmp_path: Path) -> None:
    loss, (who, doing) = LOSSES[name], SAID[name]
    pid, said = lost_ranks_program.survivors(tmp_path, name)
    assert set(said) == set(range(loss.ranks)) - {loss.lost}
    for rank, line in said.items():
        assert "RanksApartError: " in line and "fix: " in line, line
        assert re.search(who.format(rank=loss.lost, pid=pid), line), line
        assert re.search(f", while rank {rank} .*{doing}", line), line
