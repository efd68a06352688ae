"""LoRA (arXiv 2106.09685): adapters of low rank in a model whose weights stay, by peft."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from onward.errors import MissingExtraError, one_line
from onward.recipes.options import FinetuneConfig, InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ADAPTER = "adapter_config.json"
_ALL = "all-linear"
# tasks with the heads of pre-trained models, which are often tied to the embeddings
_OWN_HEAD = (
    "causal-lm", "masked-lm", "seq2seq-lm", "text-denoising", "automatic-speech-recognition",
)  # fmt: skip
# heads beside that of masked words, which is tied; a model of masked words alone lacks them
_NEW_HEADS = {"bert-pretraining": ["seq_relationship"]}


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
    head = [] if config.task in _OWN_HEAD else _NEW_HEADS.get(config.task) or _head(model)
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


__all__ = ["ADAPTER", "add_lora", "require_peft"]
