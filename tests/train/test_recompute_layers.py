"""`recompute="layers"`: each layer computed again in backward, the same bits in less memory.

The oracles are the run that keeps everything, to the bit, and eager PyTorch with gradient
checkpointing switched on.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import onward

pytestmark = pytest.mark.usefixtures("captures_kept")

T = 48


def llama(dropout: float) -> nn.Module:
    config = LlamaConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, max_position_embeddings=T, attention_dropout=dropout,
        use_cache=False,
    )  # fmt: skip
    return tiny.ready(LlamaForCausalLM(config))


def t5(dropout: float) -> nn.Module:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 3, "num_heads": 2}
    more: dict[str, Any] = {"decoder_start_token_id": 0, "use_cache": False, **sizes}
    config = T5Config(vocab_size=tiny.VOCABULARY, dropout_rate=dropout, **more)
    return tiny.ready(T5ForConditionalGeneration(config))


MODELS: dict[str, Callable[[float], nn.Module]] = {
    "gpt2": lambda p: tiny.gpt2(p, layers=4, width=16, n_positions=T, use_cache=False),
    "bert": lambda p: tiny.bert(p, layers=4, width=16, max_position_embeddings=T),
    "llama": llama,
    "t5": t5,
}
MORE: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mixed_precision": "bf16"},
    "clipped, accumulated": {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2},
}
BATCHES = [tiny.batch(4, T, "right", seed=seed) for seed in range(4)]


def run(model: nn.Module, **options: Any) -> onward.Trainer:
    """Four micro-batches on every row, with dropout."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    made = onward.Trainer(model, optimizer, options={"seed": 5, "disable": "row_demand", **options})
    for data in BATCHES:
        made.train_step(data)
    return made


def equal(a: onward.Trainer, b: onward.Trainer) -> None:
    found, wanted = a.state_dict(), b.state_dict()
    for part in ("model", "optimizer"):
        for name, tensor in wanted[part].items():
            assert torch.equal(found[part][name], tensor), name


@pytest.mark.sample(3)
@pytest.mark.parametrize("more", MORE)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_in_less_memory(name: str, more: str) -> None:
    model = MODELS[name](0.1)
    kept = run(copy.deepcopy(model), recompute="none", **MORE[more])
    again = run(copy.deepcopy(model), recompute="layers", **MORE[more])
    equal(again, kept)
    assert again.plan.arena_bytes < 0.8 * kept.plan.arena_bytes


@pytest.mark.sample(2)
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_a_model_that_is_set_to_checkpoint_does_so(name: str, reentrant: bool) -> None:
    model = MODELS[name](0.0)
    eager, kept, asked = (copy.deepcopy(model) for _ in range(3))
    for one in (model, eager, kept):
        assert isinstance(one, nn.Module)
        enable: Any = one.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    found = run(model)
    equal(found, run(asked, recompute="layers"))
    all_kept = run(kept, recompute="none")
    equal(found, all_kept)
    assert found.plan.arena_bytes < 0.8 * all_kept.plan.arena_bytes
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    eager.train()
    for data in BATCHES:
        optimizer.zero_grad()
        eager(**data).loss.backward()
        optimizer.step()
    for (path, p), q in zip(eager.named_parameters(), model.parameters(), strict=True):
        if not path.endswith("key.bias"):  # its exact gradient is 0: Adam divides noise by noise
            torch.testing.assert_close(q, p, rtol=1e-3, atol=2e-4, msg=path)


def test_switched_on_and_off_between_steps() -> None:
    model: Any = MODELS["gpt2"](0.0)
    trainer = run(model)
    before = trainer.plan.arena_bytes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of transformers have another name for it
        model.gradient_checkpointing_enable()
    trainer.train_step(BATCHES[0])
    assert trainer.plan.arena_bytes < 0.8 * before


@pytest.mark.parametrize("amount", [0.5, "2GB"])
def test_two_ways_to_say_it_are_refused(amount: Any) -> None:
    for kind in (onward.TrainerOptions, onward.ModuleOptions):
        for recompute in ("layers", "none"):
            with pytest.raises(onward.OnwardError, match="two ways to say what is recomputed"):
                kind(recompute=recompute, memory_budget=amount)
        kind(recompute="auto", memory_budget=amount)


def test_a_loop_of_ones_own_too() -> None:
    found = []
    for recompute in ("none", "layers"):
        torch.manual_seed(3)
        model = onward.accelerate(MODELS["bert"](0.1).train(), recompute=recompute)
        torch.manual_seed(4)
        model(**BATCHES[0]).loss.backward()
        explained = onward.explain(model)
        assert explained.memory is not None
        found.append(([p.grad for p in model.parameters()], explained.memory.arena))
    (grads, most), (again, least) = found
    assert all(map(torch.equal, grads, again))
    assert least < 0.8 * most


class Reenters(nn.Module):
    """A reentrant checkpoint of what is given, and of what a layer has made of it."""

    def __init__(self, given: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.head = (nn.Linear(8, 8) for _ in range(3))
        self.given = given

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = x if self.given else self.first(x)
        h = checkpoint(lambda h: torch.tanh(self.second(h)), h, use_reentrant=True)  # type: ignore[assignment]
        return nn.functional.mse_loss(self.head(h), y)


@pytest.mark.parametrize("whole", [False, True], ids=["Trainer", "accelerate"])
@pytest.mark.parametrize("given", [False, True], ids=["of a layer", "of the batch"])
def test_gradients_below_a_reentrant_checkpoint_are_eagers(given: bool, whole: bool) -> None:
    """Layers below a checkpoint of a tensor that requires no gradient stay as they are."""
    model, x, y = Reenters(given), torch.randn(5, 8), torch.randn(5, 8)
    eager = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that gradients will be None
        eager(x, y).backward()
    missing = {n for n, p in eager.named_parameters() if p.grad is None}
    assert {n.partition(".")[0] for n in missing} == ({"first", "second"} if given else set())
    if whole:
        ours = onward.accelerate(model)
        ours(x, y).backward()
        for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)
        return
    torch.optim.SGD(eager.parameters(), lr=0.1).step()
    onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1)).train_step(x, y)
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p, q)
