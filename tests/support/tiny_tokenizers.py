"""Tokenizers with few words: one with any tokens around a text, those that mark its language."""

from __future__ import annotations

import importlib
from typing import Any

LANGUAGES = {  # class: (its module, codes of a source and a target)
    "MBartTokenizer": ("mbart", "fr_XX", "de_DE"),
    "MBart50Tokenizer": ("mbart50", "fr_XX", "de_DE"),
    "NllbTokenizer": ("nllb", "fra_Latn", "deu_Latn"),
}
WORDS = ("bonjour", "monde", "guten", "tag")


def with_template(text: str, single: str) -> Any:
    """A tokenizer with `<s>`, `</s>` and others, which puts these around a text."""
    from tokenizers.processors import TemplateProcessing

    from onward.recipes.trained_tokenizer import trained_tokenizer

    tokenizer: Any = trained_tokenizer([text], 320, 64, "roberta")
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=single, special_tokens=ids
    )
    return tokenizer


def with_languages(name: str, **options: Any) -> Any:
    """A tokenizer of this class, which knows the words; options: such as its languages."""
    place = LANGUAGES[name][0]
    module: Any = importlib.import_module(f"transformers.models.{place}.tokenization_{place}")
    special = ["<s>", "<pad>", "</s>", "<unk>", "\u2581"]
    if name == "NllbTokenizer":
        letters = sorted({letter for word in WORDS for letter in word})
        vocab: Any = {word: number for number, word in enumerate([*special, *letters])}
        return module.NllbTokenizer(vocab=vocab, merges=[], **options)
    codes = [*module.FAIRSEQ_LANGUAGE_CODES, "<mask>"]
    vocab = [(word, 0.0) for word in special]
    vocab += [(f"\u2581{word}", -1.0) for word in WORDS]
    vocab += [(word, 0.0) for word in codes]
    return getattr(module, name)(vocab=vocab, **options)
