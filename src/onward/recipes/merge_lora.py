"""`onward merge-lora`: adds the adapters of a run to the weights that it began with."""

from __future__ import annotations

import dataclasses
import json
import warnings
from pathlib import Path
from typing import Any

from onward.checkpoint import StagedFiles
from onward.recipes.lora import ADAPTER, require_peft
from onward.recipes.options import InputError, is_run
from onward.recipes.run_folder import RESULTS, options_of, read_record
from onward.recipes.start_model import build_model
from onward.recipes.weights_digest import weights_sha256

_GENERATION = "generation_config.json"


def merge_lora(name: str, out: str) -> int:
    """Adds the adapters of a run to the weights that it began with, and writes plain weights, which
    need neither peft nor Onward. Returns the exit status. Raises InputError for what is no such
    run, and where its start weights are others now."""
    folder, path = Path(name), Path(out)
    if not folder.is_dir() or not is_run(folder):
        raise InputError(f"{name!r} is no folder of a run", "as RUN", "name one of onward finetune")
    options = options_of(read_record(folder))
    is_trained = (folder / ADAPTER).is_file() and (folder / RESULTS).is_file()
    if options.lora_r is None or not is_trained:
        raise InputError(
            f"the run in {name!r} has no trained adapters",
            "as RUN",
            "name one of onward finetune --lora_r 8 that is complete",
        )
    if path.exists() and any(path.iterdir() if path.is_dir() else [path]):
        raise InputError(f"{out!r} is there already", "as OUT", "name a new folder")
    require_peft()
    from peft import PeftModel
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    model_config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    began = json.loads((folder / RESULTS).read_text(encoding="utf-8"))["start_weights_sha256"]
    if weights_sha256(build_model(options, model_config)) != began:
        raise InputError(
            f"the run in {name!r} began with other weights than these",
            "as RUN",
            "give back the model that it began with, or the library versions of run_config.json",
        )
    base = build_model(dataclasses.replace(options, lora_r=None), model_config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads names that transformers renames
        adapted: Any = PeftModel.from_pretrained(base, str(folder))
        merged = adapted.merge_and_unload()
    if (folder / _GENERATION).is_file():  # such as the language that the run's texts begin in
        merged.generation_config = GenerationConfig.from_pretrained(folder)
    path.mkdir(parents=True, exist_ok=True)
    with StagedFiles(path) as staged:
        merged.save_pretrained(staged.path)
        AutoTokenizer.from_pretrained(folder).save_pretrained(staged.path)
        staged.publish()
    print(f"written to {out}: {type(merged).__name__} with plain weights")
    return 0


__all__ = ["merge_lora"]
