"""BERT's pre-training: hidden words, and whether the second of two segments follows the first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from onward.environment import environment
from onward.recipes.corpus import EVAL_ONE_IN, Text, token_counts
from onward.recipes.document_shards import DocumentShards, prepared
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.samples import Row, Samples
from onward.recipes.tasks.labelled import label_pairs, padded_with_labels
from onward.recipes.tasks.language_models import read_texts
from onward.recipes.tasks.task import (
    IGNORED_LABEL,
    Baseline,
    Collate,
    Passage,
    Task,
    TaskData,
    held_out,
)

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_SPECIAL = 3  # [CLS] first [SEP] second [SEP]
_FOLLOWS, _OTHER = 0, 1  # BertForPreTraining's labels of a pair


class BertPretraining(Task):
    """Masked language model and next sentence prediction (arXiv 1810.04805, section 3.1).

    A sample is a run of sentences of one document. Whenever it is taken, it is cut into two
    segments at random, of which the second is replaced by sentences of another document in half of
    the cases, and words are hidden.
    """

    name = "bert-pretraining"
    about = "hidden words, and whether one text follows another"
    auto_class = "AutoModelForPreTraining"
    mapping = "MODEL_FOR_NEXT_SENTENCE_PREDICTION_MAPPING"
    fetch = ("seq_relationship_logits",)

    def read(self, config: FinetuneConfig) -> tuple[Text, ...]:
        """Reads plain text: a sentence a line, an empty line between documents."""
        return read_texts(config)

    def encode(
        self,
        sources: Sequence[Text],
        tokenizer: PreTrainedTokenizerBase,
        model_config: PreTrainedConfig,
        config: FinetuneConfig,
    ) -> TaskData:
        """Tokens of all sentences, in files that are shared by all processes, and the runs of
        sentences that fill a sample."""
        if tokenizer.mask_token is None or tokenizer.cls_token is None:
            raise InputError(
                "the tokenizer has no mask token, or none that begins a text",
                "in --tokenizer_name or --model_name_or_path",
                "name one of a model like BERT",
            )
        folder = environment().cache / "text"
        parts: list[Samples] = []
        tokens: list[int] = []
        counts: list[NDArray[Any]] = []
        for source in sources:
            shards = prepared(source.documents, tokenizer, folder)
            if len(shards) < 3:
                raise InputError(
                    f"the text has {len(shards)} documents",
                    f"in {source.source}",
                    "give more, with an empty line between two",
                )
            taken: list[NDArray[Any]] = [np.arange(len(shards))]
            if len(sources) == 1:
                taken = list(held_out(len(shards), EVAL_ONE_IN))
            parts += [_runs(shards, part, config.block_size - _SPECIAL) for part in taken]
            tokens += [_tokens_of(shards, part) for part in taken]
            counts.append(token_counts(shards.tokens))
            if len(taken) > 1:  # those held out, and all others
                counts.append(_counts(shards, taken[-1]))
                counts[0][: len(counts[1])] -= counts[1]
        train, held = parts[0].first(config.max_train_samples), parts[-1]
        order = np.random.Generator(np.random.PCG64(0)).permutation(len(held))
        held = held.chosen(order[: config.max_eval_samples or len(held)])
        if not len(train) or not len(held):
            raise InputError("there is no sample", f"in {sources[0].source}", "give more text")
        # hidden tokens are told by their frequencies, the answer by a coin
        words = max(model_config.get_text_config().vocab_size, len(tokenizer))
        found = by_frequencies(counts[0], counts[-1], words) + math.log(2)
        baseline = Baseline("pretraining_loss", "frequencies and a coin", found, lower=True)
        return TaskData(train, held, baseline, tokens[0], tokens[-1])

    def draw(
        self, samples: Samples, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig
    ) -> Callable[[Row], Row]:
        """Cuts a run of sentences into a pair, and hides words of it."""
        special: Any = tokenizer
        cls, sep, mask = (getattr(special, f"{n}_token_id") for n in ("cls", "sep", "mask"))
        is_special = np.zeros(len(tokenizer), dtype=bool)
        is_special[special.all_special_ids] = True
        goes_on = _goes_on(tokenizer)
        room = config.block_size - _SPECIAL

        def draw(row: Row) -> Row:
            first, second, label = _pair(samples.beside, row["first"], row["end"], room)
            ids = np.concatenate([[cls], first, [sep], second, [sep]]).astype(np.int64)
            labels = hide_words(ids, is_special, goes_on, mask, config.mlm_probability)
            types = [0] * (len(first) + 2) + [1] * (len(second) + 1)
            return {
                "input_ids": ids.tolist(),
                "token_type_ids": types,
                "attention_mask": [1] * len(ids),
                "labels": labels.tolist(),
                "next_sentence_label": label,
            }

        return draw

    def collate(self, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig) -> Collate:
        """Pads the samples of a batch, and their labels by -100, to the longest."""
        return padded_with_labels(tokenizer)

    def counted(self, batch: Mapping[str, torch.Tensor]) -> int:
        """The samples: the loss is the sum of two means, over hidden tokens and over samples."""
        return len(batch["next_sentence_label"])

    def shown(
        self, row: Row, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig
    ) -> list[Passage]:
        """The pair; behind each hidden token, what was there before."""
        labels = enumerate(row["labels"])
        marks = {i: f"={tokenizer.decode([n])}" for i, n in labels if n != IGNORED_LABEL}
        title = "the second follows" if row["next_sentence_label"] == _FOLLOWS else "of two texts"
        return [Passage(title, row["input_ids"], marks)]

    def predictions(
        self,
        rows: Sequence[Row],
        batch: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> list[Any]:
        """The predicted and the true answer of each sample: whether the second text follows."""
        return label_pairs(outputs["seq_relationship_logits"], batch["next_sentence_label"])

    def scores(
        self, predictions: Sequence[Any], loss: float, model_config: PreTrainedConfig
    ) -> dict[str, float]:
        """The loss, and the share of pairs of which it is known whether the second text follows."""
        right = sum(told == true for told, true in predictions)
        return {"pretraining_loss": loss, "next_sentence_accuracy": right / len(predictions)}


def by_frequencies(known: NDArray[Any], held: NDArray[Any], words: int) -> float:
    """The mean loss of held-out tokens for a model that knows how often each token is in the
    training text, nats per token. known, held: how often each token occurs, by its number."""
    shares = np.full(max(words, len(known), len(held)), 1.0)  # one more of each
    shares[: len(known)] += known
    shares /= shares.sum()
    return float(-(held * np.log(shares[: len(held)])).sum() / held.sum())


def _counts(shards: DocumentShards, documents: NDArray[Any]) -> NDArray[Any]:
    """How often each token occurs in these documents."""
    ends = shards.sentences[shards.documents]
    parts = [shards.tokens[ends[d] : ends[d + 1]] for d in documents.tolist()]
    return token_counts(np.concatenate(parts))


def _tokens_of(shards: DocumentShards, documents: NDArray[Any]) -> int:
    ends = shards.sentences[shards.documents]
    return int((ends[documents + 1] - ends[documents]).sum())


def _runs(shards: DocumentShards, documents: NDArray[Any], room: int) -> Samples:
    """Runs of sentences of these documents that fill `room` tokens: `first` and `end`, sentence
    numbers, with the arrays that they are drawn from."""
    first: list[int] = []
    end: list[int] = []
    for document in documents.tolist():
        begin, stop = (int(n) for n in shards.documents[document : document + 2])
        start = begin
        for sentence in range(begin, stop):
            filled = shards.sentences[sentence + 1] - shards.sentences[start] >= room
            if filled or sentence + 1 == stop:
                first.append(start)
                end.append(sentence + 1)
                start = sentence + 1
    beside = {
        "tokens": shards.tokens,
        "sentences": shards.sentences,
        "documents": shards.documents,
        "taken": documents,
    }
    columns = {"first": np.array(first, np.int32), "end": np.array(end, np.int32)}
    return Samples(columns, None, beside)


def _pair(
    beside: Mapping[str, NDArray[Any]], first: int, end: int, room: int
) -> tuple[NDArray[Any], NDArray[Any], int]:
    """The tokens of two segments that fit into `room`, and whether the second is of another
    document. A run of one sentence has a second segment of another."""
    tokens, sentences, documents = (beside[n] for n in ("tokens", "sentences", "documents"))
    cut = first + 1 + (np.random.randint(end - first - 1) if end - first > 1 else 0)
    one = tokens[sentences[first] : sentences[cut]]
    label = _OTHER if cut == end or np.random.random() < 0.5 else _FOLLOWS
    if label == _FOLLOWS:
        two = tokens[sentences[cut] : sentences[end]]
    else:
        own = int(np.searchsorted(documents, first, side="right")) - 1
        taken = beside["taken"]
        if len(taken) == 1:  # one document is held out: the others of the text are left
            taken = np.arange(len(documents) - 1)
        other = own
        while other == own:
            other = int(np.random.choice(taken))
        start = int(np.random.randint(documents[other], documents[other + 1]))
        length = max(room - len(one), 1)
        two = tokens[
            sentences[start] : min(sentences[start] + length, sentences[documents[other + 1]])
        ]
    while len(one) + len(two) > room:
        # from the longer one, at either end, as in the reference implementation
        longer = one if len(one) > len(two) else two
        shorter = longer[1:] if np.random.random() < 0.5 else longer[:-1]
        one, two = (shorter, two) if longer is one else (one, shorter)
    return one, two, label


def _goes_on(tokenizer: Any) -> NDArray[np.bool_]:
    """Tells which tokens go on with the word of the token before, bool[V]: `##` in front, or, in
    vocabularies that mark beginnings, no mark."""
    words = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    if any(word.startswith("##") for word in words):
        return np.array([word.startswith("##") for word in words])
    return np.array([not word.startswith(("\u0120", "\u2581")) for word in words])


def hide_words(
    ids: NDArray[Any],
    is_special: NDArray[np.bool_],
    goes_on: NDArray[np.bool_],
    mask: int,
    share: float,
) -> NDArray[Any]:
    """Hides whole words among `ids` i64[T], in place, until `share` of the tokens are; returns the
    labels i64[T]. Of hidden tokens 80 % become the mask, 10 % a random token, 10 % stay.

    is_special, goes_on: bool[V], of the vocabulary.
    """
    free = ~is_special[ids]
    begins = free & ~(goes_on[ids] & np.concatenate([[False], free[:-1]]))
    word = np.cumsum(begins)  # of each token, from 1
    order = np.random.permutation(int(begins.sum())) + 1
    left = max(1, round(share * int(free.sum())))
    lengths = np.bincount(word[free], minlength=len(order) + 1)
    chosen: list[int] = []
    for number in order.tolist():
        if lengths[number] <= left or not chosen:
            chosen.append(number)
            left -= int(lengths[number])
        if left <= 0:
            break
    hidden = free & np.isin(word, chosen)
    labels = np.where(hidden, ids, IGNORED_LABEL)
    places = np.flatnonzero(hidden)
    kind = np.random.random(len(places))
    ids[places[kind < 0.8]] = mask
    random = places[kind >= 0.9]
    ids[random] = np.random.randint(0, len(is_special), len(random))
    return labels


__all__ = ["BertPretraining", "by_frequencies", "hide_words"]
