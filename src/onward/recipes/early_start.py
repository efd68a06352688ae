"""What a run does while torch and transformers are imported, which takes seconds of one core: it
reads its text, trains the tokenizer of a model from scratch, and encodes the text.

All of that needs numpy and tokenizers alone, whose work holds no lock of the interpreter. Python's
imports are safe in two threads only where they are of different packages, so that this thread
imports nothing until the other has ended.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import threading
from dataclasses import dataclass
from typing import Any

from onward.import_signals import imported_elsewhere
from onward.recipes.corpus import Text, bpe_tokenizer, encode_pieces, read_texts
from onward.recipes.options import FinetuneConfig
from onward.recipes.presets import PRESETS

FAMILIES = ("gpt2", "llama")


@dataclass(frozen=True)
class EarlyStart:
    """The texts of a run with their tokens, and the tokenizer that has made them."""

    sources: tuple[Text, ...]
    tokenizer: Any


def early_start(config: FinetuneConfig) -> EarlyStart | None:
    """Reads and encodes a run's text while torch is imported; None for a run whose tokenizer or
    samples need transformers. Raises InputError for a text that cannot be read."""
    preset = PRESETS.get(config.model_name_or_path)
    if config.task != "causal-lm" or preset is None or preset.family not in FAMILIES:
        return None
    if config.tokenizer_name is not None or importlib.util.find_spec("tokenizers") is None:
        return None
    import numpy  # noqa: F401  # imported by torch as well
    import tokenizers.processors  # noqa: F401

    with _imported(preset.family):
        sources = read_texts(config)
        tokenizer = bpe_tokenizer(sources[0].documents, config.vocab_size or preset.vocab_size)
        encoded = [
            dataclasses.replace(text, tokens=encode_pieces(tokenizer, text.documents))
            for text in sources
        ]
    return EarlyStart(tuple(encoded), tokenizer)


@contextlib.contextmanager
def _imported(family: str) -> Any:
    """A context beside which another thread imports what the run needs. It ends when that has."""
    thread = threading.Thread(target=_import, args=(family,), daemon=True)
    with imported_elsewhere():
        thread.start()
        try:
            yield
        finally:
            thread.join()


def _import(family: str) -> None:
    names = (
        "torch",
        "onward.recipes.loop",
        f"transformers.models.{family}.modeling_{family}",
        "onward.recipes.finetune",
    )
    with contextlib.suppress(Exception):  # whoever needs it says what is wrong
        for name in names:
            importlib.import_module(name)


__all__ = ["EarlyStart", "early_start"]
