"""Fine-tunes a GPT-2 with LoRA in a loop of one's own: peft adds adapters, Onward runs the model.

    python lora_with_peft.py

The adapters are then switched off, merged, and taken away; each time the model's numbers are those
of eager PyTorch, for a graph holds only as long as the model is what it was made of.
"""

from __future__ import annotations

import argparse
import inspect
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

import onward


def main() -> tuple[float, float]:
    """The loss of a held-out batch before and after."""
    torch.manual_seed(0)
    data = torch.tensor(list(inspect.getsource(argparse).encode()))
    config = GPT2Config(vocab_size=256, n_layer=2, n_embd=64, n_head=4, bos_token_id=0,
                        eos_token_id=0)  # fmt: skip
    lora = LoraConfig(r=8, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True)
    model: Any = get_peft_model(GPT2LMHeadModel(config), lora)
    onward.accelerate(model, strict=True)  # or before the adapters are added: both work

    def batch() -> torch.Tensor:
        starts = torch.randint(0, len(data) - 64, (8,)).tolist()
        return torch.stack([data[start : start + 64] for start in starts])

    def loss_of(ids: torch.Tensor) -> float:
        with torch.no_grad():
            return float(model.eval()(input_ids=ids, labels=ids, use_cache=False).loss)

    held_out = batch()
    before = loss_of(held_out)
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=2e-2)
    for _ in range(40):
        ids = batch()
        model.train()(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = loss_of(held_out)
    with model.disable_adapter():
        without = loss_of(held_out)
    model.merge_adapter()
    merged = loss_of(held_out)
    print(f"held out: {before:.3f} -> {after:.3f}; adapters off {without:.3f}, merged {merged:.3f}")
    assert abs(without - before) < 1e-4 and abs(merged - after) < 1e-4
    return before, after


if __name__ == "__main__":
    main()
