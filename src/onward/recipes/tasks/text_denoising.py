"""Spans of a text that are hidden from an encoder and written by a decoder: the pre-training of T5
and of BART.

T5 (arXiv 1910.10683): each span becomes a mark of its own, `<extra_id_0>` and so on; the target is
each mark with its span. BART (arXiv 1910.13461): each span, which may be empty, becomes one mask
token; the target is the whole text.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.samples import Row, Samples
from onward.recipes.tasks.labelled import MULTIPLE
from onward.recipes.tasks.language_models import BlockTask
from onward.recipes.tasks.sequence_to_sequence import EncoderDecoder
from onward.recipes.tasks.task import Collate, Passage, TaskData

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

    from onward.recipes.corpus import Text

Ids = NDArray[np.int64]


class TextDenoising(EncoderDecoder, BlockTask):
    """Writes the spans of a text that are hidden."""

    name = "text-denoising"
    about = "hidden spans of a text, written by a decoder"

    def encode(
        self,
        sources: Sequence[Text],
        tokenizer: PreTrainedTokenizerBase,
        model_config: PreTrainedConfig,
        config: FinetuneConfig,
    ) -> TaskData:
        """Cuts the texts into blocks. Raises InputError for blocks with too few tokens to hide a
        span, or more spans than the tokenizer has marks."""
        marks = _marks(tokenizer)
        hidden, spans = _sizes(config)
        if hidden >= config.block_size:
            raise InputError(
                f"{hidden} hidden tokens leave none of a block of {config.block_size}",
                "in --block_size",
                "give more, or a smaller --mlm_probability",
            )
        if marks and spans > len(marks):
            raise InputError(
                f"{spans} hidden spans of a block, and the tokenizer has {len(marks)} marks",
                "in --block_size",
                "give less, a smaller --mlm_probability or a larger --mean_span_length",
            )
        data = super().encode(sources, tokenizer, model_config, config)
        if not marks:  # BART's target is the text
            return data
        value = _target_perplexity(data.baseline.value, hidden, spans)
        return dataclasses.replace(data, baseline=dataclasses.replace(data.baseline, value=value))

    def draw(
        self, samples: Samples, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig
    ) -> Callable[[Row], Row]:
        """Hides `mlm_probability` of the tokens in spans of `mean_span_length` on average, others
        in each epoch. Raises InputError for a tokenizer without tokens that hide."""
        marks = _marks(tokenizer)
        hidden, spans = _sizes(config)
        first, last = _ends(tokenizer)
        mask = tokenizer.mask_token_id

        def draw(row: Row) -> Row:
            ids = np.asarray(row["input_ids"], dtype=np.int64)
            if marks:
                seen, told = spans_marked(ids, hidden, spans, np.array(marks[:spans]))
                return {"input_ids": [*seen.tolist(), *last], "labels": [*told.tolist(), *last]}
            seen = spans_masked(ids, hidden, config.mean_span_length, int(mask))  # type: ignore[arg-type]
            return {
                "input_ids": [*first, *seen.tolist(), *last],
                "labels": [*first, *ids.tolist(), *last],
            }

        return draw

    def collate(self, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig) -> Collate:
        """Pads what is seen, and the targets by -100, to the longest."""
        self.draw(Samples({}), tokenizer, config)  # says what the tokenizer lacks
        return self.padded(tokenizer, MULTIPLE)

    def shown(
        self, row: Row, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig
    ) -> list[Passage]:
        """What is seen, and the target."""
        return [Passage("seen", row["input_ids"]), Passage("target", row["labels"])]


def spans_marked(ids: Ids, hidden: int, spans: int, marks: Ids) -> tuple[Ids, Ids]:
    """T5's (input, target) of tokens i64[T]: visible and hidden spans take turns, beginning with a
    visible one; all have at least one token, but a visible one at the end, which may have none."""
    seen = _parts(len(ids) - hidden + 1, spans + 1)
    gone = _parts(hidden, spans)
    inputs: list[Any] = []
    targets: list[Any] = []
    at = 0
    for visible, covered, mark in zip(seen, gone, marks, strict=False):
        inputs += [ids[at : at + visible], [mark]]
        targets += [[mark], ids[at + visible : at + visible + covered]]
        at += visible + covered
    return np.concatenate([*inputs, ids[at:]]), np.concatenate(targets)


def spans_masked(ids: Ids, hidden: int, mean: float, mask: int) -> Ids:
    """BART's input of tokens i64[T]: spans with lengths of Poisson's distribution with this mean,
    `hidden` tokens in all, each become one mask token."""
    lengths: list[int] = []
    while sum(lengths) < hidden:
        lengths.append(min(int(np.random.poisson(mean)), hidden - sum(lengths)))
    # tokens before each span, and behind the last: any number
    gaps = _parts(len(ids) - hidden + len(lengths) + 1, len(lengths) + 1) - 1
    found: list[Any] = []
    at = 0
    for gap, length in zip(gaps, lengths, strict=False):
        found += [ids[at : at + gap], [mask]]
        at += gap + length
    return np.concatenate([*found, ids[at:]])


def _parts(total: int, count: int) -> Ids:
    """A number as so many parts of at least 1, all divisions alike probable."""
    cuts = np.sort(np.random.permutation(total - 1)[: count - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]]))


def _sizes(config: FinetuneConfig) -> tuple[int, int]:
    """The (hidden tokens, spans) of a block."""
    hidden = max(1, round(config.block_size * config.mlm_probability))
    spans = max(1, round(hidden / config.mean_span_length))
    return hidden, min(spans, hidden, max(config.block_size - hidden, 1))


def _target_perplexity(of_text: float, hidden: int, spans: int) -> float:
    """The perplexity of T5's targets by the frequencies of their tokens: of `hidden` tokens as in
    the text, and of `spans` marks and an end, each of which every target has once."""
    length = hidden + spans + 1
    share = hidden / length
    of_hidden = math.log(of_text) - math.log(share)
    return math.exp(share * of_hidden + (1 - share) * math.log(length))


def _marks(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens `<extra_id_0>` and so on, as far as there are. Raises InputError for a tokenizer
    that has neither these nor a mask token."""
    known = tokenizer.get_vocab()
    found: list[int] = []
    while (name := f"<extra_id_{len(found)}>") in known:
        found.append(known[name])
    if not found and tokenizer.mask_token is None:
        raise InputError(
            "the tokenizer has neither <extra_id_0> nor a mask token",
            "in --tokenizer_name or --model_name_or_path",
            "name one of T5 or BART",
        )
    return found


def _ends(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before a text and behind it."""
    around: list[int] = tokenizer("", add_special_tokens=True)["input_ids"]  # type: ignore[assignment]
    half = len(around) // 2
    return around[:half], around[half:]


__all__ = ["TextDenoising", "spans_marked", "spans_masked"]
