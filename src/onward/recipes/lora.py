"""LoRA (arXiv 2106.09685): adapters of low rank in a model whose weights stay, by peft; and
`onward merge-lora`, which adds trained ones to the weights."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.checkpoint import StagedFiles
from onward.errors import MissingExtraError, one_line
from onward.recipes.options import FinetuneConfig, InputError, is_run
from onward.recipes.run_folder import RESULTS, read_record

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "adapter_config.json"
_ALL = "all-linear"


def require_peft() -> None:
    """Raises MissingExtraError unless peft is installed."""
    if importlib.util.find_spec("peft") is None:
        raise MissingExtraError("peft", "lora")


def add_lora(model: PreTrainedModel, config: FinetuneConfig) -> None:
    """Adds adapters to the model, in place, and leaves them alone to be trained, with the task's
    own head. Raises InputError for modules that the model does not have."""
    require_peft()
    from peft import LoraConfig

    assert config.lora_r is not None
    asked = config.lora_target_modules
    names = None if asked is None else asked if asked == _ALL else asked.split(",")
    head = _head(model) if config.task not in ("causal-lm", "masked-lm", "seq2seq-lm") else []
    try:
        model.add_adapter(
            LoraConfig(
                r=config.lora_r,
                lora_alpha=config.lora_alpha or 2 * config.lora_r,
                lora_dropout=config.lora_dropout,
                target_modules=names,
                modules_to_save=head or None,
                # GPT-2's layers keep their weights as i x o
                fan_in_fan_out=any(type(m).__name__ == "Conv1D" for m in model.modules()),
                base_model_name_or_path=config.model_name_or_path,
            )
        )
    except (ValueError, TypeError) as error:  # of peft, for names and families it does not know
        raise InputError(
            f"peft adds no adapters to this model ({one_line(str(error), 160)})",
            "in --lora_target_modules",
            f"name linear layers of the model, or {_ALL}",
        ) from error
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name or "modules_to_save" in name)


def _head(model: PreTrainedModel) -> list[str]:
    """The modules with weights behind the model's body, which begin at random in most tasks."""
    body = model.base_model_prefix
    return [n for n, child in model.named_children() if n != body and list(child.parameters())]


def merge_lora(name: str, out: str) -> int:
    """Adds the adapters of a run to the weights that it began with, and writes plain weights, which
    need neither peft nor Onward. Returns the exit status. Raises InputError for what is no such
    run, and where its start weights are others now."""
    folder, path = Path(name), Path(out)
    if not folder.is_dir() or not is_run(folder):
        raise InputError(f"{name!r} is no folder of a run", "as RUN", "name one of onward finetune")
    record = read_record(folder)
    known = {field.name for field in dataclasses.fields(FinetuneConfig)}
    given = {n: value for n, value in record["options"].items() if n in known}
    options = FinetuneConfig(**given)
    if options.lora_r is None or not (folder / ADAPTER).is_file():
        raise InputError(
            f"the run in {name!r} has no trained adapters",
            "as RUN",
            "name one of onward finetune --lora_r 8 that is complete",
        )
    if path.exists() and any(path.iterdir() if path.is_dir() else [path]):
        raise InputError(f"{out!r} is there already", "as OUT", "name a new folder")
    require_peft()
    from peft import PeftModel
    from transformers import AutoConfig, AutoTokenizer

    from onward.recipes.start_model import build_model
    from onward.recipes.weights_digest import weights_sha256

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
    path.mkdir(parents=True, exist_ok=True)
    with StagedFiles(path) as staged:
        merged.save_pretrained(staged.path)
        AutoTokenizer.from_pretrained(folder).save_pretrained(staged.path)
        staged.publish()
    print(f"written to {out}: {type(merged).__name__} with plain weights")
    return 0


__all__ = ["ADAPTER", "add_lora", "merge_lora", "require_peft"]
