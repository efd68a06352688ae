"""Shortens messages to one line, and has the one that two modules share."""

from __future__ import annotations

LONGEST = 300  # characters of a message
READ = (
    "a number that parameters or random numbers decide is read off a tensor into Python (.item(), "
    "float(), int(), tolist(), a count of chosen rows), which no graph holds; fix: keep it a "
    "tensor (torch.where for an if), or make it an input of the batch"
)


def shortened(text: str) -> str:
    """Returns a text as one line of at most `LONGEST` characters."""
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 4]} ..."


__all__ = ["LONGEST", "READ", "shortened"]
