"""The options of `onward chat` and `onward complete`: typed, and checked before a model loads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from onward.recipes.options import REPEATED, InputError, option, repeated_option


@dataclass(frozen=True)
class ChatConfig:
    """How a model answers; every field is an option of `onward chat`."""

    prompt: str = repeated_option(
        "text to answer, may be given several times; without it the lines of the standard input"
    )
    max_new_tokens: int = option(64, "tokens of an answer at most")
    temperature: float = option(0.0, "temperature of sampling; 0: the likeliest token is taken")
    seed: int = option(42, "seed of sampling, for each answer anew")
    compare: bool = option(
        False, "show beside each answer that of the weights which the run started from"
    )
    json: bool = option(False, "print one JSON object a line in place of text")

    @property
    def prompts(self) -> list[str]:
        """The prompts of the command line."""
        return self.prompt.split(REPEATED) if self.prompt else []


# (option, condition on its value, the condition in words)
CONDITIONS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("max_new_tokens", lambda v: v > 0, "above 0"),
    ("temperature", lambda v: 0 <= v < math.inf, "of 0 or more"),
    ("seed", lambda v: 0 <= v < 2**32, "from 0 to 4294967295"),
)


def check_chat(config: ChatConfig) -> None:
    """Raises InputError for the first invalid value."""
    for name, holds, words in CONDITIONS:
        value = getattr(config, name)
        if not holds(value):
            raise InputError(f"{name} is {value!r}", f"in --{name}", f"give a value {words}")


__all__ = ["ChatConfig", "check_chat"]
