"""Tokenizers for models from scratch, trained on the run's own text, in the form of each family."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from onward.recipes.corpus import train_tokenizer, trained_bpe
from onward.recipes.presets import Family

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SENTINELS = 100  # of T5, for spans that are hidden
_BERT = {name: f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
_ROBERTA = {"bos": "<s>", "pad": "<pad>", "eos": "</s>", "unk": "<unk>", "mask": "<mask>"}

_T5 = {"pad": "<pad>", "eos": "</s>", "unk": "<unk>"}


def trained_tokenizer(
    documents: Sequence[str], vocab_size: int, positions: int, family: Family
) -> PreTrainedTokenizerBase:
    """Trains a byte-level BPE of at most `vocab_size` tokens on these texts, with the special
    tokens of the family. For BERT too: the trainer of WordPiece numbers its tokens by chance."""
    if family in ("gpt2", "llama"):
        return train_tokenizer(documents, vocab_size, positions)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from tokenizers.processors import TemplateProcessing

    special = {
        "bert": _BERT,
        "roberta": _ROBERTA,
        "t5": _T5,
        "whisper": _T5,
    }[family]
    marks = [f"<extra_id_{n}>" for n in range(SENTINELS)] if family == "t5" else []
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    words = max(vocab_size - len(marks), 300)
    tokenizer = trained_bpe(tokenizer, words, list(special.values()), documents)
    first, between, last = {
        "bert": ("[CLS]", "[SEP]", "[SEP]"),
        "roberta": ("<s>", "</s> </s>", "</s>"),
        "t5": ("", "</s>", "</s>"),
        "whisper": ("", "</s>", "</s>"),
    }[family]
    typed = 1 if family == "bert" else 0  # the second text's
    tokenizer.post_processor = TemplateProcessing(  # type: ignore[assignment]
        single=f"{first} $A {last}".strip(),
        pair=f"{first} $A {between} $B:{typed} {f'{last}:{typed}' if typed else last}".strip(),
        special_tokens=[(t, tokenizer.token_to_id(t)) for t in special.values()],
    )
    from transformers import PreTrainedTokenizerFast

    names = {f"{kind}_token": token for kind, token in special.items()}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=positions,
        model_input_names=inputs if family == "bert" else [inputs[0], inputs[2]],
        clean_up_tokenization_spaces=False,
        **names,
    )
    if marks:
        found.add_special_tokens({"additional_special_tokens": marks})
    return found


__all__ = ["SENTINELS", "trained_tokenizer"]
