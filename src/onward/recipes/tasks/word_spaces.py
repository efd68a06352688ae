"""Spaces before the words of a list, for tokenizers that know a word in a text by the space before
it, such as those of RoBERTa, BART, GPT-2 and DeBERTa."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def put_spaces_before_words(tokenizer: PreTrainedTokenizerBase) -> None:
    """Has a byte-level tokenizer put a space before each word that has none, so that the words of a
    list have the tokens of a running text; what it saves does so too. Leaves other tokenizers as
    they are, and says in one line where the space cannot be put."""
    own: Any = tokenizer
    backend = own.backend_tokenizer
    if backend.pre_tokenizer is None:
        return
    state = json.loads(backend.pre_tokenizer.__getstate__())
    parts = [part for part in _parts(state) if part["type"] == "ByteLevel"]
    if not parts or any(part["add_prefix_space"] for part in parts):
        return
    from transformers import PreTrainedTokenizerFast

    kind = type(tokenizer)
    # from tokenizer.json, as it is
    is_read = kind is PreTrainedTokenizerFast or "__init__" not in vars(kind)
    is_asked = "add_prefix_space" in inspect.signature(kind.__init__).parameters
    if state["type"] == "ByteLevel" and (is_read or is_asked):
        from tokenizers.pre_tokenizers import ByteLevel

        # a class of its own makes its parts anew by what tokenizer_config.json says
        own.init_kwargs["add_prefix_space"] = own.add_prefix_space = True
        backend.pre_tokenizer = ByteLevel(
            **{**{k: v for k, v in state.items() if k != "type"}, "add_prefix_space": True}
        )
    elif is_read:
        from tokenizers import Regex
        from tokenizers.normalizers import Prepend, Replace, Sequence

        # before the text is split: each piece of a word would get a space otherwise
        space = [Prepend(" "), Replace(Regex(r"\A {2}"), " ")]
        before = backend.normalizer
        backend.normalizer = Sequence([*([] if before is None else [before]), *space])
    else:
        print(
            f"note: {kind.__name__} puts no space before the words of a list, which then have the "
            "tokens of a text's first word",
            file=sys.stderr,
        )


def _parts(state: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """A pre-tokenizer's state, and those of the parts of a sequence."""
    yield state
    for part in state.get("pretokenizers", ()):
        yield from _parts(part)


__all__ = ["put_spaces_before_words"]
