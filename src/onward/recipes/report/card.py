"""A model card: what a run's model is, with Hugging Face's metadata in front."""

from __future__ import annotations

import json
from html import escape

from onward.recipes.report.run_data import SCORES, RunData
from onward.recipes.report.tables import result_rows
from onward.recipes.report.written_files import MARK

# the hub's names of tasks, where they are others
_PIPELINES = {
    "causal-lm": "text-generation", "masked-lm": "fill-mask", "seq2seq-lm": "text2text-generation",
    "bert-pretraining": "fill-mask", "text-denoising": "text2text-generation",
    "text-retrieval": "sentence-similarity",
}  # fmt: skip


def card(run: RunData) -> str:
    """The text of a run's README.md. JSON strings are YAML strings too, so that no name breaks the
    metadata."""
    record, options = run.record, run.options
    front = ["---", f"# {MARK} finetune", "library_name: transformers"]
    task = str(options.get("task", "causal-lm"))
    front += [f"pipeline_tag: {_plain(_PIPELINES.get(task, task))}"]
    front += ["tags:", "- onward", f"- {_plain(task)}"]
    name = str(options.get("model_name_or_path", ""))
    if not record.get("random_start"):
        front.append(f"base_model: {json.dumps(name)}")
    engine, found = next(iter(run.results.items()), ("", None))
    body = [f"# {_plain(run.name)}", ""]
    start = "random start weights" if record.get("random_start") else "its weights"
    body += [f"A model for {_plain(task)}: `{_plain(name)}` from {start}, trained with Onward.", ""]
    if found is not None:
        front += ["metrics:", *(f"- {name}" for name in SCORES if name in found)]
        body += [f"| result ({_plain(engine)}) | value |", "|---|---|"]
        body += [f"| {title} | {found[key]:{form}} |" for key, title, form in result_rows([found])]
        body.append("")
    body += ["`run_config.json` has all options and versions; `report.html` shows the run."]
    return "\n".join([*front, "---", "", *body, ""])


def _plain(text: str) -> str:
    """A text on one line that starts no markup."""
    return escape(" ".join(text.split())).replace("`", "'").replace("|", "/")
