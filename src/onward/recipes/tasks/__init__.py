"""What a run can learn: one file a task, listed here.

In: text or tables of examples. Out: samples, batches, the class of models, and scores.
Imports: corpus, tables and options of recipes; transformers' collators.
"""

from onward.recipes.options import FinetuneConfig
from onward.recipes.tasks.bert_pretraining import BertPretraining
from onward.recipes.tasks.image_classification import ImageClassification
from onward.recipes.tasks.language_models import CausalLM, MaskedLM
from onward.recipes.tasks.multiple_choice import MultipleChoice
from onward.recipes.tasks.question_answering import QuestionAnswering
from onward.recipes.tasks.separate_documents import CausalDocuments, MaskedDocuments
from onward.recipes.tasks.sequence_to_sequence import SequenceToSequence
from onward.recipes.tasks.speech_recognition import SpeechRecognition
from onward.recipes.tasks.task import IGNORED_LABEL, Baseline, Batch, Collate, Task, TaskData
from onward.recipes.tasks.text_classification import TextClassification
from onward.recipes.tasks.text_denoising import TextDenoising
from onward.recipes.tasks.text_retrieval import TextRetrieval
from onward.recipes.tasks.token_classification import TokenClassification

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        CausalLM(),
        MaskedLM(),
        TextClassification(),
        TokenClassification(),
        QuestionAnswering(),
        MultipleChoice(),
        SequenceToSequence(),
        TextDenoising(),
        TextRetrieval(),
        ImageClassification(),
        SpeechRecognition(),
        BertPretraining(),
    )
}

_APART: dict[str, Task] = {task.name: task for task in (CausalDocuments(), MaskedDocuments())}


def task_of(config: FinetuneConfig) -> Task:
    """The task that a run's options name."""
    return TASKS[config.task] if config.packing else _APART[config.task]


__all__ = [
    "IGNORED_LABEL",
    "TASKS",
    "Baseline",
    "Batch",
    "Collate",
    "Task",
    "TaskData",
    "task_of",
]
