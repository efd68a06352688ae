"""A model's weights and configuration as `from_pretrained` of Hugging Face's libraries reads them.

Tied weights are stored once, under the name that the library ties the others to; a checkpoint
notes the others, so that a model of any class gets all of its keys back.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

WEIGHTS = "model.safetensors"
CONFIG = "config.json"


@dataclass(frozen=True)
class ModelState:
    """The `state_dict` of a model, each tensor once.

    tensors: by the first of its keys. tied: each further key, and the key of the same tensor.
    extra: what else the state has (`get_extra_state`).
    """

    tensors: dict[str, torch.Tensor]
    tied: dict[str, str]
    extra: dict[str, Any]

    @classmethod
    def of(cls, model: torch.nn.Module, state: Mapping[str, Any] | None = None) -> ModelState:
        """The state of a model as it is: nothing is copied. state: its `state_dict`, where the
        model shows another."""
        state = model.state_dict() if state is None else state
        dependent = _tied_keys(model)
        first: dict[Any, str] = {}
        tensors: dict[str, torch.Tensor] = {}
        tied: dict[str, str] = {}
        for key in sorted(state, key=lambda k: k in dependent):  # stable: those go last
            value = state[key]
            if not isinstance(value, torch.Tensor):
                continue
            kept = first.setdefault(_memory(value) or key, key)
            if kept == key:
                tensors[key] = value
            else:
                tied[key] = kept
        extra = {k: v for k, v in state.items() if not isinstance(v, torch.Tensor)}
        return cls(tensors, tied, extra)

    def state_dict(self) -> dict[str, Any]:
        """The whole state, by all keys."""
        shared = {key: self.tensors[kept] for key, kept in self.tied.items()}
        return {**self.tensors, **shared, **self.extra}


def config_files(model: torch.nn.Module) -> dict[str, str]:
    """The files beside the weights from which `from_pretrained` makes the model: `config.json`
    and, of a model that generates, `generation_config.json`. Empty for a model without a config of
    that kind, and for one with adapters, whose weights have other names. The model's own config
    stays as it is."""
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_json_string") or getattr(model, "_hf_peft_config_loaded", False):
        return {}
    config = copy.deepcopy(config)
    config.architectures = [type(model).__name__]
    dtype = getattr(model, "dtype", None)
    if isinstance(dtype, torch.dtype):
        config.dtype = str(dtype).removeprefix("torch.")
    files = {CONFIG: config.to_json_string(use_diff=True)}
    generation = getattr(model, "generation_config", None)
    if generation is not None and getattr(model, "can_generate", bool)():
        files["generation_config.json"] = generation.to_json_string(use_diff=True)
    return {name: text for name, text in files.items() if _is_json(text)}


def _tied_keys(model: torch.nn.Module) -> frozenset[str]:
    """The keys that Hugging Face's models tie to others, and do not store."""
    found: set[str] = set()
    for path, module in model.named_modules():
        keys = getattr(module, "_tied_weights_keys", None)
        if isinstance(keys, Mapping | list | tuple | set):
            found |= {f"{path}.{key}".lstrip(".") for key in keys}
    return frozenset(found)


def _memory(tensor: torch.Tensor) -> Any:
    """What two tensors that are one have in common; None of an empty one."""
    if tensor.layout != torch.strided or not tensor.numel() or tensor.is_meta:
        return None
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _is_json(text: Any) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (TypeError, ValueError):
        return False


__all__ = ["CONFIG", "WEIGHTS", "ModelState", "config_files"]
