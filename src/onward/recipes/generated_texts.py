"""Texts that a trained model writes, beside those that it should, and what is scored by them."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.checkpoint import StagedFiles
from onward.recipes.model_size import target_positions
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
    search, at most as many tokens as a target has, and as the decoder has positions for."""
    import torch

    from onward.model_state.device import device_of
    from onward.recipes.devices import moved

    model_of: Any = model
    model_of.eval()
    device = device_of(model)
    draw, tokenizer = task.draw(samples, processor, config), tokenizer_of(processor)
    size, most = config.per_device_eval_batch_size, _most_new_tokens(model_of, task, config)
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
                max_new_tokens=most,
                num_beams=config.generation_num_beams,
                do_sample=False,
            )
        for i, row, ids in zip(part, rows, written.tolist(), strict=True):
            told = str(tokenizer.decode(ids, skip_special_tokens=True)).strip()
            found[i] = {"source": task.source(row, processor)}
            found[i] |= {"target": task.target(row).strip(), "prediction": told}
    return found


_WHISPERS = ("lang_to_id", "task_to_id", "no_timestamps_token_id")


def _most_new_tokens(model: Any, task: Task, config: FinetuneConfig) -> int:
    """Tokens of a text, at most, that fit into the decoder's positions behind what `generate` puts
    before a text: the decoder's start; of Whisper its marks of language, task and times too."""
    most, positions = task.longest_target(model.config, config), target_positions(model.config)
    if positions is None:
        return most
    given = model.generation_config
    marks = sum(getattr(given, name, None) is not None for name in _WHISPERS)
    forced = getattr(given, "forced_decoder_ids", None) or ()
    return max(1, min(most, positions - 1 - max(marks, len(forced))))


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
