"""Languages of a tokenizer that marks texts with theirs: mBART, mBART-50, M2M100, NLLB."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from onward.recipes.options import FinetuneConfig, InputError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_BOTH = "in --source_lang and --target_lang"
# decoders that begin with the last token of a target, moved to its front
_WRAPPING = ("mbart", "plbart")


def has_languages(tokenizer: Any) -> bool:
    """Whether a tokenizer marks texts with their language."""
    return hasattr(tokenizer, "src_lang") and hasattr(tokenizer, "set_tgt_lang_special_tokens")


def set_languages(tokenizer: Any, model_config: PreTrainedConfig, config: FinetuneConfig) -> None:
    """Has the tokenizer mark sources and targets with the languages that the options name, else
    with those that it was saved with. Raises InputError where one is missing or unknown, and where
    the model's targets have the mark in a place that `generate` cannot begin with."""
    given = {"source_lang": config.source_lang, "target_lang": config.target_lang}
    if not has_languages(tokenizer):
        if named := [f"--{name}" for name, value in given.items() if value is not None]:
            told = f"note: {' and '.join(named)} change nothing: the tokenizer has no languages"
            print(told, file=sys.stderr)
        return
    # a source alone may be the default of the tokenizer's class
    saved = tokenizer.init_kwargs if tokenizer.init_kwargs.get("tgt_lang") else {}
    given["source_lang"] = given["source_lang"] or saved.get("src_lang")
    given["target_lang"] = given["target_lang"] or saved.get("tgt_lang")
    if missing := [name for name, value in given.items() if not value]:
        raise InputError(
            f"the tokenizer marks texts with their language, and {' and '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not given",
            _BOTH,
            f"give both, as codes such as {tokenizer.src_lang}",
        )
    for name, code in given.items():
        _check_code(tokenizer, name, str(code))
    tokenizer.tgt_lang = given["target_lang"]
    tokenizer.src_lang = given["source_lang"]  # last: from here on it marks sources
    _starts(tokenizer, model_config)


def settle_languages(model: Any, tokenizer: Any) -> None:
    """Has the model's `generate` begin texts in the tokenizer's target language."""
    if has_languages(tokenizer):
        start, forced = _starts(tokenizer, model.config)
        model.generation_config.forced_bos_token_id = forced
        if start is not None:
            model.generation_config.decoder_start_token_id = start
            model.config.decoder_start_token_id = start


def _marks(tokenizer: Any, code: str) -> tuple[list[int], list[int]]:
    """The ids before a target of this language and behind it."""
    try:
        tokenizer.set_tgt_lang_special_tokens(code)
        return list(tokenizer.prefix_tokens), list(tokenizer.suffix_tokens)
    finally:
        tokenizer.set_src_lang_special_tokens(tokenizer.src_lang)


def _check_code(tokenizer: Any, name: str, code: str) -> None:
    """Raises InputError for a code that the tokenizer does not know."""
    try:
        found = [number for part in _marks(tokenizer, code) for number in part]
        known = tokenizer.unk_token_id not in found and None not in found
    except Exception:  # any, since each class says it by another one
        known = False
    if not known:
        raise InputError(
            f"the tokenizer has no language {code!r}",
            f"in --{name}",
            f"give one of its codes, such as {tokenizer.src_lang}",
        )


def _starts(tokenizer: Any, model_config: PreTrainedConfig) -> tuple[int | None, int | None]:
    """The (id that a decoder begins with, id that it is made to write first): None where the model
    says it, or nothing is forced. Raises InputError where targets have their language elsewhere."""
    before, behind = _marks(tokenizer, tokenizer.tgt_lang)
    start = behind[-1] if model_config.model_type in _WRAPPING else None
    if before and before[0] != tokenizer.eos_token_id:
        return start, before[0]
    if start is not None and start != tokenizer.eos_token_id:
        return start, None
    raise InputError(
        f"a {model_config.model_type} does not begin texts as {type(tokenizer).__name__} marks "
        "their language",
        "in --model_name_or_path",
        "name an mBART, M2M100 or NLLB model with its own tokenizer (of NLLB's, one without "
        "legacy_behaviour)",
    )


__all__ = ["has_languages", "set_languages", "settle_languages"]
