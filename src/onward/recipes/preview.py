"""`onward data`: what a run would train on, as the model sees it; nothing is trained or written."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from onward.recipes.describe import Run, describe
from onward.recipes.finetune import fact_lines
from onward.recipes.loop import update_batches
from onward.recipes.options import DataConfig

BATCHES = 64  # of which shares are counted
WIDTH = 96  # columns of a block's text
BARS = 40  # columns of the longest bar
_SHOWN = {"\n": "\u21b5\n", "\t": "\u21e5", "\r": "\u240d"}  # what cannot be seen


@dataclass(frozen=True)
class DataFacts:
    """Counts of a run's data. samples are blocks for language models, else examples. longest:
    tokens of a sample. left_out: tokens of the train text behind its last whole block. labelled:
    the share of a batch's tokens that have a label (a label of a whole sample counts as one).
    padding: the share of a batch that is padding. vocabulary: ids of the model; None where its
    inputs are images. used: ids that occur in the train samples.
    unknown: the share of tokens outside of the tokenizer's vocabulary; None where it has a token
    for every byte. baseline: the score without a model."""

    task: str
    train_source: str
    eval_source: str
    documents: int
    characters: int
    train_tokens: int
    train_samples: int
    eval_samples: int
    longest: int
    left_out: int
    labelled: float
    padding: float
    vocabulary: int | None
    used: int
    unknown: float | None
    baseline: dict[str, Any]


def facts_of(run: Run) -> DataFacts:
    """Counts what a run would train on."""
    job, text, tokenizer = run.job, run.sources[0], run.tokenizer
    ids = np.concatenate([a.reshape(-1) for a in job.train.token_ids()] or [np.empty(0, int)])
    unknown: Any = getattr(tokenizer, "unk_token_id", None)
    is_own = isinstance(unknown, int) and unknown != tokenizer.eos_token_id
    is_blocks = job.task.unit == "blocks"
    labelled, padding = _shares(run)
    return DataFacts(
        task=job.config.task,
        train_source=text.source,
        eval_source=run.sources[-1].source if run.eval_tokens else "held out of the train text",
        documents=len(text.documents),
        characters=len(text),
        train_tokens=run.train_tokens,
        train_samples=len(job.train),
        eval_samples=len(job.eval),
        longest=int(max(_lengths(run))),
        left_out=run.train_tokens % job.config.block_size if is_blocks else 0,
        labelled=labelled,
        padding=padding,
        vocabulary=getattr(job.model_config.get_text_config(), "vocab_size", None),
        used=len(np.unique(ids)),
        unknown=float((ids == unknown).mean()) if is_own else None,
        baseline=asdict(run.baseline),
    )


def _lengths(run: Run) -> list[int]:
    """The tokens of each sample: of its first text where it has several, and of a whole block
    where it is put together anew each time; of an image its patches."""
    train, task = run.job.train, run.job.task
    if task.inputs == "images":
        return [run.train_tokens // len(train)] * len(train)
    names = [n for n in train.columns if n.partition(".")[0] == task.length_column]
    return train.lengths(names[0]).tolist() if names else [run.job.config.block_size] * len(train)


def _shares(run: Run) -> tuple[float, float]:
    """The shares of tokens with labels, and of padding, in the first batches of the first epoch."""
    job = run.job
    size = job.config.per_device_train_batch_size
    drawn, collate = job.drawn(job.train), job.collate()
    labels = tokens = places = 0
    loader = update_batches(drawn, min(size, len(job.train)), job.config.seed)
    for rows in itertools.islice(loader, BATCHES):
        batch = collate(rows)
        labels += job.task.counted(batch)
        places += job.task.places(batch, job.model_config)
        tokens += job.task.tokens(batch, job.model_config)
    return labels / tokens, 1 - tokens / places


def lines_of(facts: DataFacts, unit: str) -> list[str]:
    """The counts in words. unit: of samples, in the plural."""
    f = facts
    texts = f"{f.documents:,} texts, {f.characters:,} characters, {f.train_tokens:,} tokens"
    if f.vocabulary is None:
        texts = f"{f.train_tokens:,} patches"
    lines = [
        f"train      {f.train_source}: {texts}",
        f"{unit:<10} {f.train_samples:,} of at most {f.longest} tokens to train on, "
        f"{f.eval_samples:,} to evaluate ({f.eval_source})"
        + (f"; {f.left_out} tokens at the end fill no block" if f.left_out else ""),
        f"labels     for {f.labelled:.1%} of the tokens; {f.padding:.1%} of a batch is padding",
        f"baseline   {f.baseline['metric']} {f.baseline['value']:.4g}: {f.baseline['of']}",
    ]
    if f.vocabulary is not None:
        lines.insert(-1, f"vocabulary {f.vocabulary:,} ids, {f.used:,} of which occur")
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


def shown_block(tokenizer: Any, ids: Sequence[int], marks: Mapping[int, str] | None = None) -> str:
    """The tokens of a sample, `|` between them; ends of lines are shown and kept. marks: words
    behind tokens, by their places."""
    words = [str(tokenizer.decode([int(i)], clean_up_tokenization_spaces=False)) for i in ids]
    words = [word + (marks or {}).get(place, "") for place, word in enumerate(words)]
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
    facts, job = facts_of(run), run.job
    if config.json:
        print(json.dumps(asdict(facts), indent=2))
        return 0
    print("\n".join([*lines_of(facts, job.task.unit), *fact_lines(run)]))
    if job.task.unit != "blocks":
        lengths = _lengths(run)
        print("\n" + "\n".join(histogram(lengths, "tokens")))
    elif facts.documents > 1:
        texts = run.sources[0].documents
        print("\n" + "\n".join(histogram([len(d) for d in texts], "characters")))
    chosen = np.random.default_rng(config.seed).permutation(len(job.train))[: config.samples]
    drawn = job.drawn(job.train)
    for number in sorted(int(i) for i in chosen):
        for part in job.task.shown(drawn[number], job.processor, job.model_config):
            title = f", {part.title}" if part.title else ""
            told = shown_block(run.tokenizer, part.ids, part.marks)
            print(f"\n{job.task.unit.removesuffix('s')} {number:,}{title}\n{told}")
    return 0


__all__ = ["DataFacts", "facts_of", "histogram", "lines_of", "preview", "shown_block"]
