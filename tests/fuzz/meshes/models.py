"""The model of a case, and the batches of its ranks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from fuzz.engines import namespace
from fuzz.histories import case_of as program_of
from fuzz.meshes.draw import Case
from fuzz.source import batch_source
from torch import nn

Tensors = dict[str, torch.Tensor]


class InvalidCase(Exception):
    """A seed that means no run of ranks."""


@dataclass
class Drawn:
    """A module in training mode, its loss function if it has one, and its batches: a function of
    the number of a batch, its rows and its length. said: what it is, as text."""

    module: nn.Module
    loss_fn: Any
    batch: Callable[[int, int, int], Tensors]
    said: str


def model_of(case: Case) -> Drawn:
    """The model of a case. Raises InvalidCase for a program that is no model of ranks."""
    torch.manual_seed(case["seed"])
    return _program(case) if case["is_program"] else _family(case)


def _program(case: Case) -> Drawn:
    """A random program of the fuzzer of Trainers, without what happens around it."""
    given = program_of(10_000 + case["seed"])
    given |= {"base": "", "wrap": "", "collator": "", "history": []}
    if case["seed"] % 2:
        given["attributes"] = {k: 0.3 if k == "p" else v for k, v in given["attributes"].items()}
        for x in given["modules"]:
            x["code"] = x["code"].replace("Dropout(0.0)", "Dropout(0.3)").replace("p=0.0", "p=0.3")
    try:
        defined = namespace(given)
        module: nn.Module = defined["Model"]().train()
    except Exception as error:
        raise InvalidCase(f"{error!r}"[:200]) from error
    if not any(p.requires_grad and p.is_floating_point() for p in module.parameters()):
        raise InvalidCase("nothing is trained")

    def batch(number: int, rows: int, length: int) -> Tensors:
        dice = random.Random(f"{case['seed']} {number}")
        spec = {**given["batches"][0], "seed": dice.randrange(10_000), "size": rows}
        spec["length"] = length
        made: Tensors = eval(batch_source(given, spec), dict(defined))
        return made

    from fuzz.source import definitions

    return Drawn(module, defined.get("loss_fn"), batch, definitions(given))


def _family(case: Case) -> Drawn:
    said = case["model"]
    import tiny

    kind, vocabulary = said["kind"], said["vocabulary"]
    small: dict[str, Any] = {"vocab_size": vocabulary, "tie_word_embeddings": said["is_tied"]}
    dropout, layers, heads, width = (said[k] for k in ("dropout", "layers", "heads", "width"))
    if kind == "gpt2":
        module: Any = tiny.gpt2(dropout, layers, width, n_head=heads, **small)
    elif kind == "bert":
        module = tiny.bert(dropout, layers, width, num_attention_heads=heads, **small)
    elif kind == "llama":
        module = _llama(layers, heads, width, small)
    else:
        module = _t5(dropout, layers, heads, width, small)
    if said["frozen"]:
        next(module.parameters()).requires_grad_(False)

    def batch(number: int, rows: int, length: int) -> Tensors:
        seed = case["seed"] * 1000 + number
        padding = "right" if said["is_padded"] and kind != "gpt2" else None
        data = tiny.batch(rows, length, padding, seed=seed)
        data = {n: x if n == "attention_mask" else x % vocabulary for n, x in data.items()}
        generator = torch.Generator().manual_seed(seed)
        drop = torch.rand(data["labels"].shape, generator=generator) >= said["labelled"]
        if "attention_mask" in data:
            drop |= data["attention_mask"] == 0
        data["labels"] = data["labels"].masked_fill(drop, -100)
        return data

    return Drawn(module, None, batch, repr(said))


def _llama(layers: int, heads: int, width: int, small: dict[str, Any]) -> Any:
    import tiny
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        max_position_embeddings=64, **small,
    )  # fmt: skip
    return tiny.ready(LlamaForCausalLM(config))


def _t5(dropout: float, layers: int, heads: int, width: int, small: dict[str, Any]) -> Any:
    import tiny
    from transformers import T5Config, T5ForConditionalGeneration

    settings: dict[str, Any] = {
        "d_model": width, "d_kv": width // heads, "d_ff": 2 * width, "num_layers": layers,
        "num_heads": heads, "dropout_rate": dropout, "decoder_start_token_id": 0,
        "use_cache": False, **small,
    }  # fmt: skip
    config = T5Config(**settings)
    return tiny.ready(T5ForConditionalGeneration(config))


__all__ = ["Drawn", "InvalidCase", "Tensors", "model_of"]
