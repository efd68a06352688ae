"""Answers that stand in a passage, as in SQuAD."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from onward.recipes.library_examples import library_tables, questions_about_functions
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.samples import Row
from onward.recipes.tables import Table
from onward.recipes.tasks.labelled import (
    check_padding,
    data_of,
    longest,
    padded,
    read_tables,
    split,
)
from onward.recipes.tasks.task import Baseline, Collate, Passage, Task, TaskData

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

_BEST = 20  # starts and ends that are combined
_LONGEST_ANSWER = 30  # tokens


class QuestionAnswering(Task):
    """The first and the last token of the answer in a passage. A passage that is longer than the
    model's inputs is read in pieces that overlap by `doc_stride` tokens; a piece without the answer
    points at the token of a class, else at its first. Where a table has questions without an
    answer, as SQuAD 2, that token's score competes with those of the spans."""

    name = "question-answering"
    about = "the answer to a question, in a passage"
    auto_class = "AutoModelForQuestionAnswering"
    mapping = "MODEL_FOR_QUESTION_ANSWERING_MAPPING"
    fetch = ("start_logits", "end_logits")

    def read(self, config: FinetuneConfig) -> tuple[Table, ...]:
        """Reads tables in SQuAD's form, or docstrings and the functions that they are of."""
        if config.train_file is None:
            return library_tables(questions_about_functions, config.corpus_bytes)
        return read_tables(config)

    def encode(
        self,
        sources: Sequence[Table],
        tokenizer: PreTrainedTokenizerBase,
        model_config: PreTrainedConfig,
        config: FinetuneConfig,
    ) -> TaskData:
        """Tokens of the question with each piece of the passage, and where the answer is."""
        if not tokenizer.is_fast:
            raise InputError(
                "the tokenizer does not say where a token stands in its text",
                "in --tokenizer_name or --model_name_or_path",
                "name one that the tokenizers library reads",
            )
        size = longest(config, model_config, 384)
        check_padding(tokenizer, model_config)
        model_config.num_labels = 2  # a start and an end; a classifier's folder says its own
        by_question = [
            [_pieces(table, i, tokenizer, size, config.doc_stride) for i in range(len(table.rows))]
            for table in sources
        ]
        questions = [pieces for part in by_question for pieces in part]
        without = [pieces for pieces in questions if not pieces[0]["_answers"]]
        if not without:
            for row in (row for pieces in questions for row in pieces):
                row["_null"] = -1
        # whole questions are held out, not pieces of one
        whole = [[{"pieces": p} for p in part] for part in by_question]
        train, held = split(sources, whole, config)
        rows = [[row for one in part for row in one["pieces"]] for part in (train, held)]
        for number, row in enumerate(held):
            for piece in row["pieces"]:
                piece["_question"] = number
        for row in rows[0]:
            row["_question"] = 0
        golden = [_texts(one["pieces"][0]["_answers"]) for one in held]
        first = [_texts(one["pieces"][0]["_context"])[0].split()[:1] or [""] for one in held]
        guess = sum(
            _best(word_f1, words[0], true) for words, true in zip(first, golden, strict=True)
        )
        baseline = Baseline("f1", "first word of the passage", 100 * guess / len(held))
        none = sum(true == [""] for true in golden)
        if none > guess:
            baseline = Baseline("f1", "no answer to any question", 100 * none / len(held))
        fact = (
            f"{len(without)} of {len(questions)} questions have no answer; the empty one is "
            "predicted where it scores above every span"
            if without
            else "every question has an answer, and a span is always predicted"
        )
        return data_of(rows[0], rows[1], baseline, (fact,))

    def collate(self, tokenizer: PreTrainedTokenizerBase, config: FinetuneConfig) -> Collate:
        """Pads the samples of a batch to the longest, behind them, as places are counted from the
        first token."""
        return padded(tokenizer, "right")

    def counted(self, batch: Mapping[str, torch.Tensor]) -> int:
        """One answer a sample."""
        return len(batch["start_positions"])

    def shown(
        self, row: Row, tokenizer: PreTrainedTokenizerBase, model_config: PreTrainedConfig
    ) -> list[Passage]:
        """The question with a piece of the passage, titled by the answer."""
        first, last = row["start_positions"], row["end_positions"]
        answer = tokenizer.decode(row["input_ids"][first : last + 1])
        is_there = row["_offsets"][2 * last + 1] > 0
        marks = {last: " <- answer"} if is_there else {}
        return [Passage(f"answer {answer}" if is_there else "no answer", row["input_ids"], marks)]

    def predictions(
        self,
        rows: Sequence[Row],
        batch: Mapping[str, torch.Tensor],
        outputs: Mapping[str, torch.Tensor],
    ) -> list[Any]:
        """The number of each piece's question, its best answer, that one's score, the score of no
        answer (-inf where there always is one), and the true answers."""
        starts, ends = outputs["start_logits"].float(), outputs["end_logits"].float()
        found = []
        for row, start, end in zip(rows, starts, ends, strict=True):
            offsets = row["_offsets"]
            context = _texts(row["_context"])[0]
            best, answer = float("-inf"), ""
            # behind the last token the batch is padding; what is no passage ends at 0
            places = [n for n in range(len(offsets) // 2) if offsets[2 * n + 1] > 0]
            for i in _best_of(start, places):
                for j in _best_of(end, places):
                    if i <= j < i + _LONGEST_ANSWER:
                        score = float(start[i] + end[j])
                        if score > best:
                            best, answer = score, context[offsets[2 * i] : offsets[2 * j + 1]]
            null = row["_null"]
            none = float(start[null] + end[null]) if null >= 0 else float("-inf")
            found.append((row["_question"], best, answer, none, _texts(row["_answers"])))
        return found

    def scores(
        self, predictions: Sequence[Any], loss: float, model_config: PreTrainedConfig
    ) -> dict[str, float]:
        """SQuAD's exact match and F1, in percent, of the best answer of each question's pieces.
        Where questions may have no answer, the empty one is told if its least score over the pieces
        is above the best span's, and both scores are given for each kind of question too, named as
        by the metric squad_v2."""
        best: dict[int, tuple[float, str, list[str]]] = {}
        least: dict[int, float] = {}
        for question, score, answer, none, true in predictions:
            if question not in best or score > best[question][0]:
                best[question] = (score, answer, true)
            least[question] = min(none, least.get(question, none))
        told = [
            ("" if least[question] > score else answer, true)
            for question, (score, answer, true) in best.items()
        ]
        if max(least.values()) == float("-inf"):
            return _percents("exact_match", "f1", told)
        answered = [(answer, true) for answer, true in told if true != [""]]
        others = [(answer, true) for answer, true in told if true == [""]]
        # a true answer of articles and punctuation alone is none, as the metric has it
        answered = [(a, [t for t in true if normalized(t)] or [""]) for a, true in answered]
        return {
            **_percents("exact_match", "f1", answered + others),
            **_percents("HasAns_exact", "HasAns_f1", answered),
            **_percents("NoAns_exact", "NoAns_f1", others),
        }


def _percents(exact: str, overlap: str, told: Sequence[tuple[str, list[str]]]) -> dict[str, float]:
    """Exact match and F1, by these names, of answers beside the true ones of each; nothing where
    there is no answer."""
    found: dict[str, float] = {}
    for name, score in ((exact, exact_match), (overlap, word_f1)):
        if told:
            found[name] = 100 * sum(_best(score, *one) for one in told) / len(told)
    return found


def _best_of(scores: torch.Tensor, places: Sequence[int]) -> list[int]:
    """The places with the highest scores f32[T]."""
    return sorted(places, key=scores.tolist().__getitem__, reverse=True)[:_BEST]


def _codes(texts: Sequence[str]) -> list[int]:
    """Texts as numbers: their characters, with a 0 between two texts."""
    return [ord(letter) for letter in "\0".join(texts)]


def _texts(codes: Sequence[int]) -> list[str]:
    return "".join(map(chr, codes)).split("\0")


def _pieces(
    table: Table, index: int, tokenizer: PreTrainedTokenizerBase, size: int, stride: int
) -> list[Row]:
    """The samples of one question. Columns that begin with _ are for the scores."""
    question = table.value(index, "question", str, "a text").strip()
    context = table.value(index, "context", str, "a text").replace("\0", " ")
    answers, starts = _answers(table, index, context)
    try:
        found = tokenizer(
            question,
            context,
            truncation="only_second",
            max_length=size,
            stride=stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
            verbose=False,
        )
    except BaseException as error:  # the tokenizers library panics where nothing is left
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise InputError(
            f"a question leaves no room for a passage in {size} tokens with doc_stride {stride}",
            table.where(index),
            "give more --max_seq_length, less --doc_stride, or leave the question out",
        ) from error
    names = [n for n in found if n not in ("offset_mapping", "overflow_to_sample_mapping")]
    rows: list[Row] = []
    for piece, offsets in enumerate(found["offset_mapping"]):
        null = _null_place(found["input_ids"][piece], tokenizer)
        inside = [part == 1 for part in found.sequence_ids(piece)]
        flat = [
            n
            for is_in, pair in zip(inside, offsets, strict=True)
            for n in (pair if is_in else (0, 0))
        ]
        first = last = null
        if answers:
            begin, end = starts[0], starts[0] + len(answers[0])
            at = [t for t, is_in in enumerate(inside) if is_in]
            covered = at and offsets[at[0]][0] <= begin and offsets[at[-1]][1] >= end
            if covered and end > begin:
                first = next(t for t in reversed(at) if offsets[t][0] <= begin)
                last = next(t for t in at if offsets[t][1] >= end)
        rows.append(
            {
                **{n: found[n][piece] for n in names},
                "start_positions": first,
                "end_positions": last,
                "_offsets": flat,
                "_context": _codes([context]),
                "_answers": _codes(answers),
                "_null": null,
            }
        )
    return rows


def _null_place(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> int:
    """The place of the token that says that there is no answer."""
    for special in (tokenizer.cls_token_id, tokenizer.bos_token_id):
        if special in ids:
            return ids.index(special)
    return 0


def _answers(table: Table, index: int, context: str) -> tuple[list[str], list[int]]:
    """The answers of a row and where they begin; empty ones are left out. Raises InputError where
    they stand elsewhere."""
    value = table.value(index, "answers", dict, "text and answer_start, as SQuAD")
    texts, starts = value.get("text"), value.get("answer_start")
    if isinstance(texts, str):
        texts, starts = [texts], [starts]
    if not isinstance(texts, list) or not isinstance(starts, list) or len(texts) != len(starts):
        raise InputError(
            "answers have no text and answer_start", table.where(index), "give lists of one length"
        )
    pairs = [(text, start) for text, start in zip(texts, starts, strict=True) if text != ""]
    for text, start in pairs:
        fits = isinstance(text, str) and isinstance(start, int) and start >= 0
        if not fits or context[start : start + len(text)] != text:
            raise InputError(
                f"the answer {str(text)[:40]!r} does not stand at {start} in the passage",
                table.where(index),
                "count characters of the passage from 0",
            )
    return [text for text, _ in pairs], [start for _, start in pairs]


def normalized(text: str) -> str:
    """An answer as SQuAD compares it: without case, punctuation and articles."""
    letters = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", letters).split())


def exact_match(told: str, true: str) -> float:
    """1 where two answers are one, else 0."""
    return float(normalized(told) == normalized(true))


def word_f1(told: str, true: str) -> float:
    """The F1 of the words of two answers."""
    a, b = normalized(told).split(), normalized(true).split()
    if not a or not b:
        return float(a == b)
    shared = sum((Counter(a) & Counter(b)).values())
    return 2 * shared / (len(a) + len(b))


def _best(score: Any, told: str, true: Sequence[str]) -> float:
    return max(score(told, each) for each in true)


__all__ = ["QuestionAnswering", "exact_match", "normalized", "word_f1"]
