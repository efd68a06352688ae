"""Texts that a trained model writes, beside those that it should, and what is scored by them."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.checkpoint import StagedFiles
from onward.recipes.options import FinetuneConfig
from onward.recipes.run_folder import PREDICTIONS
from onward.recipes.samples import Samples
from onward.recipes.sound_processor import tokenizer_of
from onward.recipes.tasks import Task
from onward.recipes.tasks.question_answering import exact_match, word_f1

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_ROUGE = ("rouge1", "rouge2", "rougeL")
Texts = dict[str, str]  # source, target, prediction


def generated_texts(
    model: PreTrainedModel, task: Task, samples: Samples, processor: Any, config: FinetuneConfig
) -> list[Texts]:
    """What the model writes for each sample, by transformers' `generate`: greedily, or by beam
    search, at most `max_target_length` tokens."""
    import torch

    from onward.model_state.device import device_of
    from onward.recipes.devices import moved

    model_of: Any = model
    model_of.eval()
    device = device_of(model)
    draw, tokenizer = task.draw(samples, processor, config), tokenizer_of(processor)
    size = config.per_device_eval_batch_size
    lengths = samples.lengths(task.length_column)
    order = sorted(range(len(samples)), key=lambda i: int(lengths[i]))
    found: list[Texts] = [{}] * len(samples)
    for start in range(0, len(order), size):
        part = order[start : start + size]
        rows = [draw(samples[i]) for i in part]
        batch = moved(task.prompts(rows, processor), device)
        with torch.no_grad():
            written = model_of.generate(
                **batch,
                max_new_tokens=config.max_target_length,
                num_beams=config.generation_num_beams,
                do_sample=False,
            )
        for i, row, ids in zip(part, rows, written.tolist(), strict=True):
            parts = {"target": row["labels"], "prediction": ids}
            found[i] = {"source": task.source(row, processor)}
            found[i] |= {name: _decoded(ids, tokenizer) for name, ids in parts.items()}
    return found


def _decoded(ids: Sequence[int], tokenizer: Any) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True)).strip()


def text_scores(texts: Sequence[Texts]) -> dict[str, float]:
    """Scores of predictions, 0 to 100: the share that is exact, F1 of words; ROUGE where
    rouge-score is installed, BLEU where sacrebleu is, error rates of words and characters where
    jiwer is."""
    pairs = [(each["prediction"], each["target"]) for each in texts]
    found = {
        "exact_match": 100 * sum(exact_match(*pair) for pair in pairs) / len(pairs),
        "f1": 100 * sum(word_f1(*pair) for pair in pairs) / len(pairs),
    }
    if importlib.util.find_spec("rouge_score") is not None:
        scorer: Any = importlib.import_module("rouge_score.rouge_scorer")
        rouge = scorer.RougeScorer(list(_ROUGE), use_stemmer=True)
        each = [rouge.score(true, told) for told, true in pairs]
        for name in _ROUGE:
            found[name] = 100 * sum(one[name].fmeasure for one in each) / len(pairs)
    if importlib.util.find_spec("sacrebleu") is not None:
        sacrebleu: Any = importlib.import_module("sacrebleu")
        told, true = zip(*pairs, strict=True)
        found["bleu"] = float(sacrebleu.corpus_bleu(list(told), [list(true)]).score)
    heard = [pair for pair in pairs if pair[1]]  # rates are of the words of true texts
    if importlib.util.find_spec("jiwer") is not None and heard:
        jiwer: Any = importlib.import_module("jiwer")
        told, true = (list(part) for part in zip(*heard, strict=True))
        found |= {"wer": 100 * jiwer.wer(true, told), "cer": 100 * jiwer.cer(true, told)}
    return found


def write_texts(folder: Path, texts: Sequence[Texts]) -> None:
    """Writes the texts of each sample, a JSON object a line."""
    with StagedFiles(folder) as staged:
        lines = (json.dumps(each, ensure_ascii=False) + "\n" for each in texts)
        (staged.path / PREDICTIONS).write_text("".join(lines), encoding="utf-8")
        staged.publish()


__all__ = ["generated_texts", "text_scores", "write_texts"]
