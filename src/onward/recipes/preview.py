"""`onward data`: what a run would train on, as the model sees it; nothing is trained or written."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from onward.recipes.corpus import Ids
from onward.recipes.finetune import Run, describe
from onward.recipes.options import DataConfig

WIDTH = 96  # columns of a block's text
BARS = 40  # columns of the longest bar
_SHOWN = {"\n": "\u21b5\n", "\t": "\u21e5", "\r": "\u240d"}  # what cannot be seen


@dataclass(frozen=True)
class DataFacts:
    """Counts of a run's data. left_out: tokens of the train text behind its last whole block.
    labelled: the share of tokens that are predicted, which are all but the first of a block.
    used: ids that occur in the train blocks. unknown: the share of tokens outside of the
    tokenizer's vocabulary; None where it has a token for every byte."""

    train_source: str
    eval_source: str
    documents: int
    characters: int
    train_tokens: int
    train_blocks: int
    eval_blocks: int
    block_size: int
    left_out: int
    labelled: float
    vocabulary: int
    used: int
    unknown: float | None
    unigram_perplexity: float


def facts_of(run: Run) -> DataFacts:
    """Counts what a run would train on."""
    job, text, tokenizer = run.job, run.texts[0], run.tokenizer
    size, ids = job.config.block_size, job.train_blocks
    unknown: Any = tokenizer.unk_token_id
    is_own = isinstance(unknown, int) and unknown != tokenizer.eos_token_id
    return DataFacts(
        train_source=text.source,
        eval_source=run.texts[-1].source if run.eval_tokens else "held out of the train text",
        documents=len(text.documents),
        characters=len(text),
        train_tokens=run.train_tokens,
        train_blocks=len(ids),
        eval_blocks=len(job.eval_blocks),
        block_size=size,
        left_out=run.train_tokens % size,
        labelled=(size - 1) / size,
        vocabulary=job.model_config.get_text_config().vocab_size,
        used=len(np.unique(ids)),
        unknown=float((ids == unknown).mean()) if is_own else None,
        unigram_perplexity=run.unigram,
    )


def lines_of(facts: DataFacts) -> list[str]:
    """The counts in words."""
    f = facts
    lines = [
        f"train      {f.train_source}: {f.documents:,} documents, {f.characters:,} characters, "
        f"{f.train_tokens:,} tokens ({f.characters / f.train_tokens:.2f} characters each)",
        f"blocks     {f.train_blocks:,} of {f.block_size} tokens to train on, {f.eval_blocks:,} to "
        f"evaluate ({f.eval_source}); {f.left_out} tokens at the end fill no block",
        f"labels     {f.labelled:.1%} of the tokens: all but the first of a block; no padding",
        f"vocabulary {f.vocabulary:,} ids, {f.used:,} of which occur",
        f"baseline   perplexity {f.unigram_perplexity:.1f} by the frequencies of tokens alone",
    ]
    if f.unknown is not None:
        lines.append(f"unknown    {f.unknown:.2%} of the tokens are none of the tokenizer's")
    return lines


def histogram(lengths: Sequence[int], unit: str) -> list[str]:
    """Lines with the number of lengths between powers of two, and bars."""
    low, high = (max(1, n).bit_length() - 1 for n in (min(lengths), max(lengths)))
    counts = [0] * (high - low + 1)
    for n in lengths:
        counts[max(1, n).bit_length() - 1 - low] += 1
    most = max(counts)
    return [f"{'length, ' + unit:>24}{'count':>9}"] + [
        f"{f'{1 << power:,} to {(2 << power) - 1:,}':>24}{count:>9,}  "
        + "\u2588" * -(-count * BARS // most)
        for power, count in zip(range(low, high + 1), counts, strict=True)
    ]


def shown_block(tokenizer: Any, ids: Ids) -> str:
    """The tokens of a block, `|` between them; ends of lines are shown and kept."""
    words = [str(tokenizer.decode([int(i)], clean_up_tokenization_spaces=False)) for i in ids]
    shown = ["".join(_SHOWN.get(letter, letter) for letter in word) for word in words]
    lines, column = list[str](), 0
    line = ""
    for word in shown:
        if column + len(word) + 1 > WIDTH:
            lines.append(line)
            line, column = "", 0
        line += ("|" if line else "") + word
        *whole, last = line.split("\n")
        lines += whole
        line, column = last, len(last)
    return "\n".join(f"  {each}" for each in [*lines, line] if each)


def preview(config: DataConfig) -> int:
    """Prints what `onward finetune` with these options would train on. Returns the exit status."""
    run = describe(config)
    facts = facts_of(run)
    if config.json:
        print(json.dumps(asdict(facts), indent=2))
        return 0
    print("\n".join(lines_of(facts)))
    if facts.documents > 1:
        print("\n" + "\n".join(histogram([len(d) for d in run.texts[0].documents], "characters")))
    blocks = run.job.train_blocks
    chosen = np.random.default_rng(config.seed).permutation(len(blocks))[: config.samples]
    for number in sorted(int(i) for i in chosen):
        print(f"\nblock {number:,}\n{shown_block(run.tokenizer, blocks[number])}")
    return 0


__all__ = ["DataFacts", "facts_of", "histogram", "lines_of", "preview", "shown_block"]
