"""Times a mixture of experts three ways: eager PyTorch, its loop as a graph, its loop as a region.

    PYTHONPATH=src python tests/capture/loops_or_regions.py Mixtral GptOss

The classes are `<name>ForCausalLM` of the transformers that is installed: one layer, 256 wide, 8
experts of 512, 2 for a token. A step is forward and backward of 2 x 256 tokens on one thread, the
three ways in turn; seconds of the process, since machines are shared, the least of 4. A JSON line
for each class: docs/notes/0035-loops-or-regions.md has what it printed.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any
from unittest import mock

import torch
import transformers as hf
from torch import nn

import onward
from onward.capture.expert_loops import NOT_ASKED, ExpertLoops
from onward.capture.masked_rows.rows import RULES

REPEATS = 4
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 1024,
    "use_cache": False, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 512, "num_local_experts": 8,
    "num_experts": 8,
}  # fmt: skip
LATENT = {
    "n_routed_experts": 8, "n_shared_experts": 1, "first_k_dense_replace": 0, "q_lora_rank": 64,
    "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 64,
    "n_group": 1, "topk_group": 1, "head_dim": 32,
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "DeepseekV2": LATENT, "DeepseekV3": LATENT, "GptOss": {"head_dim": 64},
    "JetMoe": {"kv_channels": 64, "num_key_value_heads": 2},
    "Dbrx": {
        "d_model": 256, "n_heads": 4, "n_layers": 1, "max_seq_len": 1024,
        "ffn_config": {"ffn_hidden_size": 512, "moe_num_experts": 8, "moe_top_k": 2,
                       "hidden_size": 256},
        "attn_config": {"kv_n_heads": 4, "rope_theta": 1e4, "clip_qkv": 8.0},
    },
}  # fmt: skip


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    cls = getattr(hf, f"{name}ForCausalLM")
    sizes = {"use_cache": False, "vocab_size": 512} if name == "Dbrx" else SIZES
    return cls(cls.config_class(**{**sizes, **OWN.get(name, {})})).train()


def step(model: nn.Module, batch: dict[str, torch.Tensor]) -> float:
    """Seconds of a forward and a backward."""
    model.zero_grad()
    began = time.process_time()
    model(**batch).loss.backward()
    return time.process_time() - began


def far(model: nn.Module, eager: nn.Module) -> float:
    """The largest relative distance of a gradient from eager's."""
    pairs = zip(model.parameters(), eager.parameters(), strict=True)
    return max(float((p.grad - q.grad).norm() / q.grad.norm().clamp(min=1e-9))
               for p, q in pairs if p.grad is not None and q.grad is not None)  # fmt: skip


def measured(name: str) -> dict[str, Any]:
    tokens = torch.randint(2, 500, (2, 256), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": tokens, "labels": tokens}
    ways, first = {"eager": model_of(name)}, {"eager": 0.0}
    ways["loop"] = onward.accelerate(model_of(name))
    first["loop"] = step(ways["loop"], batch)
    ways["region"] = onward.accelerate(model_of(name))
    rules = {n: r for n, r in RULES.items() if n not in ("__iter__", "tolist")}
    with (
        mock.patch.object(ExpertLoops, "answer", lambda *args: NOT_ASKED),
        mock.patch.object(ExpertLoops, "note", lambda *args: None),
        mock.patch.object(ExpertLoops, "places", lambda self: []),
        mock.patch.dict(RULES, rules, clear=True),
    ):
        first["region"] = step(ways["region"], batch)
    least = {way: min(step(model, batch) for _ in range(1)) for way, model in ways.items()}
    for _ in range(REPEATS - 1):
        least = {way: min(t, step(ways[way], batch)) for way, t in least.items()}
    found: dict[str, Any] = {"model": name, "transformers": hf.__version__}
    for way, model in ways.items():
        found[way] = {"first": round(first[way], 2), "step": round(least[way], 4),
                      "gradients": f"{far(model, ways['eager']):.0e}"}  # fmt: skip
        if way != "eager":
            call = model._compiled_call_impl.last_call()  # type: ignore[operator,union-attr]
            parts = [part.path for part in call.captured.regions]
            found[way] |= {"peak": call.plan.peak, "regions": parts}
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for each in sys.argv[1:]:
        print(json.dumps(measured(each)), flush=True)
