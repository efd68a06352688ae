"""Every model family of transformers, tiny, against eager: equal, refused, or wrong.

`python tests/models/sweep.py [--out FILE] [--jobs N] [FAMILY ...]` tries them all, each in a
process of its own, and says what became of them in lines of JSON; the suite runs a sample.
"""

from __future__ import annotations

import argparse
import collections
import copy
import importlib
import json
import multiprocessing
import pkgutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

import tiny
import torch
import transformers as hf
from tiny import Tensors
from torch import nn

from onward.errors import OnwardError

HEADS = ("ForCausalLM", "LMHeadModel", "WithLMHeadModel", "ForMaskedLM", "ForConditionalGeneration")
OTHERS = ("ForSequenceClassification", "ForPreTraining", "Model")
IMPLEMENTATIONS = ("sdpa", "eager")
MASKS = ("none", "right", "left", "hidden", "square")
VOCABULARY = 61
SECONDS = 420

# every size a config may name -> a small one; they fit together: 4 heads of 8 are 32 wide
SIZES: dict[str, int] = {
    **dict.fromkeys(
        ["hidden_size", "d_model", "n_embd", "dim", "model_dim", "embed_dim", "embedding_size",
         "emb_dim", "word_embed_proj_dim", "attention_hidden_size", "text_embed_dim",
         "transformer_width", "projection_dim", "lru_width", "mamba_d_inner"],
        32,
    ),
    **dict.fromkeys(
        ["num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers",
         "decoder_layers", "num_decoder_layers", "num_encoder_layers", "num_hidden_groups"],
        2,
    ),
    **dict.fromkeys(
        ["num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
         "decoder_attention_heads", "num_key_value_heads", "multi_query_group_num"],
        4,
    ),
    **dict.fromkeys(
        ["intermediate_size", "d_ff", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim",
         "hidden_dim", "d_inner", "ffn_hidden_size", "moe_intermediate_size", "inner_dim",
         "shared_expert_intermediate_size", "expert_ffn_hidden_size"],
        48,
    ),
    **dict.fromkeys(["head_dim", "d_kv", "d_head", "attention_head_dim", "kv_channels"], 8),
    **dict.fromkeys(
        ["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length",
         "max_seq_length", "max_source_positions", "max_target_positions"],
        64,
    ),
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"], 4),
    **dict.fromkeys(["num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk"], 2),
    **dict.fromkeys(["first_k_dense_replace", "n_group", "topk_group", "n_shared_experts"], 1),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank"], 16),
    **dict.fromkeys(["qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "qk_head_dim"], 8),
    "vocab_size": VOCABULARY, "type_vocab_size": 2, "rotary_dim": 4, "sliding_window": 4,
    "attention_window": 4, "block_size": 4, "state_size": 4, "max_span_length": 4,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def families() -> list[str]:
    """The names of all modules under `transformers.models` that hold models."""
    models = Path(next(iter(importlib.import_module("transformers.models").__path__)))
    return sorted({p.parent.name for p in models.glob("*/modeling_*.py")})


def classes_of(family: str) -> list[type[Any]]:
    """The classes to try: every language model, else one other; none where an extra is missing."""
    folder = f"transformers.models.{family}"
    classes: dict[str, type[Any]] = {}
    for item in pkgutil.iter_modules(importlib.import_module(folder).__path__):
        if not item.name.startswith("modeling_"):
            continue
        try:
            file = importlib.import_module(f"{folder}.{item.name}")
        except ImportError:
            continue
        classes |= {
            name: cls
            for name, cls in vars(file).items()
            if isinstance(cls, type)
            and issubclass(cls, hf.PreTrainedModel)
            and cls.__module__ == file.__name__
            and cls.config_class is not None
            and not name.endswith("PreTrainedModel")
        }
    chosen = [c for n, c in classes.items() if n.endswith(HEADS)]
    for head in OTHERS:
        chosen = chosen or [c for n, c in classes.items() if n.endswith(head)][:1]
    return chosen


def small(config_class: type[Any]) -> Any:
    """A config with every known size made small, dropout off."""
    plain = config_class()
    text = plain.get_text_config() if hasattr(plain, "get_text_config") else plain
    known = set(plain.to_dict()) | set(getattr(plain, "attribute_map", {}))
    changes: dict[str, Any] = {k: v for k, v in SIZES.items() if k in known}
    for key, value in plain.to_dict().items():
        if "drop" in key and isinstance(value, (int, float)) and not isinstance(value, bool):
            changes[key] = 0.0
        if key in ("sliding_window", "attention_window", "q_lora_rank") and value is None:
            changes.pop(key, None)
        if key == "layer_types" and isinstance(value, list):
            kinds = list(dict.fromkeys(value))
            changes[key] = (kinds * 2)[: max(2, len(kinds))]
            changes["num_hidden_layers"] = len(changes[key])
    if isinstance(getattr(plain, "attribute_map", None), dict):
        mapped = plain.attribute_map
        changes = {k: v for k, v in changes.items() if mapped.get(k) not in changes}
    if text is not plain:
        for name in plain.sub_configs:
            part = getattr(plain, name, None)
            if part is not None:
                changes[name] = small(type(part)).to_dict()
    config = config_class(**{**changes, **OWN.get(config_class.model_type, {})})
    for key, value in TOKENS.items():
        setattr(config, key, value)
    return config


class Scored(nn.Module):
    """A model that returns hidden states, and a loss made of them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        x = self.model(**batch)[0]
        return (x - torch.arange(x.shape[-1]).to(x.dtype) / 8).square().mean()


def build(cls: type[Any], implementation: str) -> nn.Module:
    """The tiny model in training mode; where it has no such attention, with eager's."""
    torch.manual_seed(0)
    config = small(cls.config_class)
    for part in (config, config.get_text_config()):
        part.use_cache = False
        if cls.__name__.endswith(("ForCausalLM", "LMHeadModel")) and hasattr(part, "is_decoder"):
            part.is_decoder = True
    config._attn_implementation = implementation
    model = cls(config)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    model = tiny.ready(model)
    return model if cls.__name__.endswith((*HEADS, *OTHERS[:2])) else Scored(model).train()


def batch(model: nn.Module, masks: str) -> Tensors:
    """Labels everywhere, at padding too: what attention makes of rows that see nothing counts."""
    core = model.model if isinstance(model, Scored) else model
    size, length = (8, 8) if masks == "square" else (3, 8)
    ids = 3 + tiny.tokens(size, length, seed=5) % (VOCABULARY - 3)
    data = {"input_ids": ids}
    if core is model:
        short = type(core).__name__.endswith("ForSequenceClassification")
        data["labels"] = ids[:, 0] % 2 if short else ids.clone()
    if masks != "none":
        mask = torch.ones_like(ids)
        for row in range(1, size):
            hidden = 1 + row % 3
            mask[row, : hidden if masks == "left" else 0] = 0
            mask[row, length - hidden if masks != "left" else length :] = 0
        if masks == "hidden":
            mask[1] = 0
        data["attention_mask"] = mask
    return data


def runs(model: nn.Module, batches: Mapping[str, Tensors]) -> Iterator[tuple[str, Tensors]]:
    """Onward's loss and gradients for each batch: of every row, then of the rows that are read.

    A capture serves every batch that it accepts, as in training.
    """
    made: list[tiny.Compiled] = []
    for name, data in batches.items():
        tensors = list(data.values())
        fit = next((c for c in made if len(c.captured.leaves) == len(data)
                    and c.captured.dims(tensors) is not None), None)  # fmt: skip
        if fit is None:
            fit = tiny.compiled(model, data)
            made.append(fit)
        trained = tiny.trained(fit)
        for form, forward in (("", fit.forward), (", packed", fit.packed(["loss"]))):
            if forward is None:
                continue
            graph = fit.differentiated(trained, forward)
            names = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
            if graph.counts:
                yield name + form, tiny.execute_packed(fit, graph, data, names)[0]
            else:
                yield name + form, tiny.execute(fit, graph, data, names)


def difference(ours: Tensors, model: nn.Module, data: Tensors) -> str:
    """The tensor that differs most, where one differs at all."""
    want = tiny.eager(model, data, torch.float32)
    if not all(t.isfinite().all() for t in want.values()):
        return ""
    try:
        exact = tiny.eager(model, data, torch.float64)
    except RuntimeError:  # a model that names float32 itself
        exact = want
    return tiny.differing_most(tiny.plain(ours), want, exact)


def outcome(cls: type[Any], implementation: str, masks: tuple[str, ...] = MASKS) -> dict[str, str]:
    """Kind of mask -> `equal`, `refused: why`, `WRONG: where`, `eager: why` (it fails itself)."""
    found: dict[str, str] = {}
    try:
        model = build(cls, implementation)
    except Exception as error:
        return dict.fromkeys(masks, f"eager: not built: {type(error).__name__}: {error}"[:200])
    batches = {}
    for name in masks:
        try:
            data = batch(model, name)
            loss = tiny.eager(model, data, torch.float32)["loss"]
            assert loss.isfinite(), "a loss that is not finite"
            batches[name] = data
        except Exception as error:
            found[name] = f"eager: {type(error).__name__}: {error}"[:200]
    for group in (("none",), ("right", "left", "hidden"), ("hidden",), ("square",)):
        part = {n: batches[n] for n in group if n in batches}
        twin = copy.deepcopy(model)
        label = "hidden first" if group == ("hidden",) else ""
        try:
            for name, ours in runs(twin, part):
                key = label or name
                wrong = difference(ours, model, batches[name.partition(",")[0]])
                found[key] = f"WRONG: {wrong}" if wrong else found.get(key, "equal")
        except OnwardError as error:
            found |= {n: f"refused: {error}"[:300] for n in (part if not label else [label])
                      if n not in found}  # fmt: skip
        except Exception as error:
            found |= {n: f"CRASH: {type(error).__name__}: {error}"[:300]
                      for n in (part if not label else [label]) if n not in found}  # fmt: skip
    return found


# ---- all of them, each family in a process of its own


def rows_of(family: str) -> Iterator[dict[str, Any]]:
    """What became of each class of the family, under each attention that it has."""
    for cls in classes_of(family):
        seen: set[str] = set()
        for implementation in IMPLEMENTATIONS:
            try:
                got = build(cls, implementation)
                core: Any = got.model if isinstance(got, Scored) else got
                have = str(core.config._attn_implementation)
            except Exception as error:
                if "support an attention implementation" in str(error):
                    continue
                have = implementation
            if have not in seen:
                seen.add(have)
                found = outcome(cls, implementation)
                yield {"family": family, "class": cls.__name__, "attention": have, "found": found}


def _alone(family: str, out: Path) -> None:
    """Adds one line of JSON for each class and implementation."""
    warnings.simplefilter("ignore")
    with out.open("a") as file:
        for row in rows_of(family):
            file.write(json.dumps(row) + "\n")
            file.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--out", type=Path, default=Path("sweep.jsonl"))
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    waiting = list(options.families or families())
    context = multiprocessing.get_context("fork")  # what is imported is imported once
    running: dict[str, tuple[Any, float]] = {}
    while waiting or running:
        while waiting and len(running) < options.jobs:
            family = waiting.pop(0)
            process = context.Process(target=_alone, args=(family, options.out))
            process.start()
            running[family] = process, time.monotonic() + SECONDS
        for family, (process, deadline) in list(running.items()):
            process.join(0.1)
            if process.is_alive() and time.monotonic() < deadline:
                continue
            process.kill()
            process.join()
            del running[family]
            if process.exitcode:
                print(f"{family}: ended with {process.exitcode}", flush=True)
    counts: collections.Counter[str] = collections.Counter()
    for line in options.out.read_text().splitlines():
        row = json.loads(line)
        kinds = sorted({text.partition(":")[0] for text in row["found"].values()})
        counts[" and ".join(kinds)] += 1
        print(f"{row['class']} ({row['attention']}): {', '.join(kinds)}")
    print(dict(counts))


if __name__ == "__main__":
    main()
