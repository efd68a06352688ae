"""The switches of `onward finetune` that are for some tasks only."""

from __future__ import annotations

# tasks on plain text, of a file or of a column of a table
TEXT_TASKS = ("causal-lm", "masked-lm", "text-denoising", "bert-pretraining")
_LABELLED_TEXTS = (
    "text-classification", "token-classification", "multiple-choice", "seq2seq-lm",
    "text-retrieval",
)  # fmt: skip
_MEDIA = ("image-classification", "automatic-speech-recognition")
_WRITING = ("seq2seq-lm", "automatic-speech-recognition")
_ALL_WITH_TOKENS = (
    *TEXT_TASKS, *_LABELLED_TEXTS, "question-answering", "automatic-speech-recognition",
)  # fmt: skip

# the tasks that each switch is for; a switch that is not here is for all
SWITCH_TASKS: dict[str, tuple[str, ...]] = {
    "tokenizer_name": _ALL_WITH_TOKENS,
    "vocab_size": _ALL_WITH_TOKENS,
    "text_column": (*TEXT_TASKS, *_LABELLED_TEXTS, *_MEDIA),
    "label_column": (*_LABELLED_TEXTS, *_MEDIA),
    "block_size": TEXT_TASKS,
    "packing": ("causal-lm", "masked-lm"),
    "max_seq_length": (*_LABELLED_TEXTS, "question-answering"),
    "max_target_length": _WRITING,
    "source_lang": ("seq2seq-lm",),
    "target_lang": ("seq2seq-lm",),
    "source_prefix": ("seq2seq-lm",),
    "predict_with_generate": _WRITING,
    "generation_num_beams": _WRITING,
    "towers": ("text-retrieval",),
    "pooling": ("text-retrieval",),
    "crossing": ("text-retrieval",),
    "teacher_model": ("text-retrieval",),
    "doc_stride": ("question-answering",),
    "mlm_probability": ("masked-lm", "text-denoising", "bert-pretraining"),
    "mean_span_length": ("text-denoising",),
}

__all__ = ["SWITCH_TASKS", "TEXT_TASKS"]
