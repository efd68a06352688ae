"""The options of `onward search`: typed, and checked before a model loads."""

from __future__ import annotations

from dataclasses import dataclass

from onward.recipes.options import REPEATED, InputError, option, repeated_option


@dataclass(frozen=True)
class SearchConfig:
    """What is searched for; every field is an option of `onward search`."""

    query: str = repeated_option(
        "text to search for, may be given several times; without it the lines of the standard input"
    )
    k: int = option(5, "documents that are shown for a query")
    json: bool = option(False, "print one JSON object a line in place of text")

    @property
    def queries(self) -> list[str]:
        """The queries of the command line."""
        return self.query.split(REPEATED) if self.query else []


def check_search(config: SearchConfig) -> None:
    """Raises InputError for an invalid value."""
    if config.k < 1:
        raise InputError(f"k is {config.k}", "in --k", "give a value above 0")


__all__ = ["SearchConfig", "check_search"]
