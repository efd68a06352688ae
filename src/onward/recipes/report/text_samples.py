"""Continuations of prompts by a run's trained model."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.errors import one_line
from onward.recipes.report.written_files import SAMPLES
from onward.recipes.run_folder import publish_json
from onward.recipes.samples import Samples

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPTS, LONGEST = 2, 32  # tokens of a prompt, and of its continuation
MOST_PARAMETERS = 200_000_000  # a larger model takes minutes on a CPU


def write_samples(
    folder: Path, tokenizer: PreTrainedTokenizerBase, held: Samples, parameters: int
) -> None:
    """Writes `samples.json`: greedy continuations of the first samples to evaluate on, by the model
    that the folder holds. A model that cannot go on a text costs one line on stderr."""
    if parameters > MOST_PARAMETERS:
        return
    try:
        publish_json(folder, SAMPLES, samples(folder, tokenizer, held))
    except Exception as error:  # any, since a report decides about no run
        told = one_line(str(error) or type(error).__name__, 200)
        print(f"note: the report lacks samples of text: {told}", file=sys.stderr, flush=True)


def samples(
    folder: Path, tokenizer: PreTrainedTokenizerBase, held: Samples
) -> list[dict[str, str]]:
    """Greedy continuations of the starts of the first samples."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found: list[dict[str, str]] = []
    for sample in held.first(PROMPTS):
        row = [int(token) for token in sample["input_ids"]]
        length = min(LONGEST, len(row) // 2)
        prompt = torch.tensor(row[:length])[None]
        made = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            num_beams=1,
            max_new_tokens=length,
            pad_token_id=tokenizer.eos_token_id,
        )
        texts = [tokenizer.decode(ids) for ids in (row[:length], made[0, length:])]
        found.append({"prompt": str(texts[0]), "text": str(texts[1])})
    return found
