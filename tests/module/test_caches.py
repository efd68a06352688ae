"""Modules around causal and sequence-to-sequence models whose config has its cache on, as it is by
default: a graph where nobody can generate by the call, with None in the place of the cache; else
eager PyTorch, and a warning that says what to set. The oracle is eager PyTorch, cache and all.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import peft
import pytest
import tiny
import tiny_families
import torch
from torch import nn
from transformers.cache_utils import Cache
from twins import CLOSE, assert_same

import onward
from onward.errors import EagerWarning
from onward.module import accelerated

# peft asks transformers' models by names of yesterday
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")

FAMILIES: dict[str, Callable[[], Any]] = {
    "GPT-2": lambda: tiny.gpt2(0.0, layers=1),
    "Llama": tiny_families.of("Llama", "CausalLM", use_cache=True),
    "Gemma 2": tiny_families.of("Gemma2", "CausalLM", use_cache=True, sliding_window=4),
    "T5": tiny_families.of("T5", "ConditionalGeneration", use_cache=True),
    "BART": tiny_families.of("Bart", "ConditionalGeneration", use_cache=True),
}
TARGETS = {"GPT-2": "c_attn", "T5": "q"}


class Around(nn.Module):
    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, **batch: Any) -> Any:
        return self.lm(**batch)


class Batch(Around):
    """Takes the whole batch as one argument."""

    def forward(self, batch: Any) -> Any:  # type: ignore[override]
        return self.lm(**batch)


class Tuple(Around):
    def forward(self, **batch: Any) -> Any:
        return self.lm(**batch).to_tuple()


class Named(Around):
    def forward(self, **batch: Any) -> Any:
        found = self.lm(**batch)
        return {"kept": found.get("past_key_values"), "scores": found.logits * 2}


class Reward(Around):
    """Reads hidden states by their place, and returns no cache."""

    def __init__(self, lm: Any) -> None:
        super().__init__(lm)
        self.head = nn.Linear(lm.config.hidden_size, 1)

    def forward(self, **batch: Any) -> Any:
        found = self.lm(**batch, output_hidden_states=True)
        at = "hidden_states" if "hidden_states" in found else "decoder_hidden_states"
        states = found[list(found).index(at)]
        return self.head(states[-1]).squeeze(-1)


class Chunks(Around):
    """Reads the cache itself: the second half of the tokens after the first."""

    def forward(self, input_ids: torch.Tensor, **batch: Any) -> Any:
        half = input_ids.shape[1] // 2
        first = self.lm(input_ids=input_ids[:, :half])
        rest = self.lm(input_ids=input_ids[:, half:], past_key_values=first.past_key_values)
        return torch.cat((first.logits, rest.logits), 1)


def _adapted(lm: Any, family: str) -> Any:
    torch.manual_seed(3)
    task = "SEQ_2_SEQ_LM" if family in ("T5", "BART") else "CAUSAL_LM"
    config = peft.LoraConfig(
        r=2, target_modules=[TARGETS.get(family, "q_proj")], init_lora_weights=False,
        fan_in_fan_out=family == "GPT-2", task_type=task,
    )  # fmt: skip
    return peft.get_peft_model(lm, config)


WRAPPERS: dict[str, Callable[[Any, str], Any]] = {
    "keywords": lambda lm, _: Around(lm),
    "one argument": lambda lm, _: Batch(lm),
    "nested": lambda lm, _: Around(Around(lm)),
    "onward.Module within": lambda lm, _: Around(onward.Module(lm)),
    "a tuple": lambda lm, _: Tuple(lm),
    "a dict": lambda lm, _: Named(lm),
    "hidden states": lambda lm, _: Reward(lm),
    "peft": _adapted,
    "around peft": lambda lm, family: Around(_adapted(lm, family)),
}
SILENT = {"hidden states"}  # which return no cache
MODES = ["train", "train, no labels", "eval", "eval, no labels", "no_grad", "no_grad, no labels"]


def batch(family: str, labels: bool) -> dict[str, torch.Tensor]:
    ids = tiny.tokens(2, 9)
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    found = {"input_ids": ids, "attention_mask": mask}
    if labels:
        return {**found, "labels": ids.masked_fill(mask == 0, -100)}
    return {**found, "decoder_input_ids": ids} if family in ("T5", "BART") else found


def told(act: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What it gives, and what is said of eager mode."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always", EagerWarning)
        found = act()
    return found, [str(w.message) for w in said if issubclass(w.category, EagerWarning)]


def without_cache(x: Any) -> Any:
    """The outputs with None for each cache, and in transformers' own without it."""
    if isinstance(x, Cache):
        return None
    if isinstance(x, dict):
        kind = type(x)
        found = {k: without_cache(v) for k, v in x.items()}
        return found if kind is dict else kind(**found)
    return tuple(map(without_cache, x)) if isinstance(x, tuple) else x


def tensors(x: Any) -> list[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        return [x]
    parts = x.values() if isinstance(x, dict) else x if isinstance(x, tuple) else ()
    return [t for part in parts for t in tensors(part)]


@pytest.mark.sample(6)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_graph_or_what_to_set(family: str, wrapper: str, captures: list[int]) -> None:
    lm = FAMILIES[family]()
    assert lm.config.use_cache
    eager = WRAPPERS[wrapper](lm, family)
    ours = onward.accelerate(copy.deepcopy(eager), outputs="all")
    path = next(n for n, m in ours.named_modules() if getattr(m, "config", None) is not None)
    held = accelerated(ours)
    assert held is not None
    for mode in MODES:
        held._last = None
        labels = "no labels" not in mode
        given = batch(family, labels)
        call = (lambda m, b=given: m(b)) if wrapper == "one argument" else lambda m, b=given: m(**b)
        for m in (ours, eager):
            m.train(mode.startswith("train"))
            m.zero_grad()
        before = len(captures)
        with torch.set_grad_enabled("no_grad" not in mode):
            found, said = told(lambda call=call: call(ours))
            with onward.eager():  # of a wrapper within
                want = call(eager)
        assert ours.get_submodule(path).config.use_cache, "as it was"
        if mode == "no_grad, no labels" and wrapper not in SILENT:
            [line] = said
            assert "a cache of keys and values" in line and "config.use_cache = False" in line
            assert len(line) < 300 and "\n" not in line
            assert_same(without_cache(found), without_cache(want))
            assert any(
                isinstance(x, Cache) for x in (found if type(found) is tuple else found.values())
            )
            continue
        made = len(captures) - before  # a graph with gradients serves without them too
        assert not said and (made == 1 or ("no_grad" in mode and not made)), mode
        held.last_call()  # raises unless a graph has run
        assert_same(found, without_cache(want))
        if "no_grad" not in mode:
            for out in (found, want):
                torch.stack(
                    [t.square().mean() for t in tensors(without_cache(out))]
                ).sum().backward()
            for (n, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), n
                if q.grad is not None:
                    torch.testing.assert_close(
                        p.grad, q.grad, **CLOSE, msg=lambda m, n=n: f"{n} {m}"
                    )


@pytest.mark.parametrize("family", ["GPT-2", "Llama"])
def test_a_cache_that_the_forward_reads_is_read(family: str) -> None:
    eager = Chunks(FAMILIES[family]())
    ours = onward.accelerate(copy.deepcopy(eager), strict=True)
    for m in (ours, eager):
        m(**batch(family, labels=True)).square().mean().backward()
    assert_same(ours(**batch(family, True)), eager(**batch(family, True)))
    for p, q in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, **CLOSE)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_is_the_one_without_a_cache(family: str) -> None:
    """No launch and no byte is spent on what nobody reads."""
    plans = []
    for on in (True, False):
        lm = FAMILIES[family]()
        for m in lm.modules():
            if hasattr(m, "config") and not on:
                m.config.use_cache = False
        model = onward.accelerate(Around(lm), strict=True)
        model(**batch(family, labels=True)).loss.backward()
        held = accelerated(model)
        assert held is not None
        plans.append((len(held.plan.launches), held.plan.peak))
        notes = [note for note in held.report()["notes"] if "cache" in note]
        made = on and family != "BART"  # which makes no cache where labels are given
        assert len(notes) == made and all(n.startswith("past_key_values is None") for n in notes)
    assert plans[0] == plans[1]


@pytest.mark.parametrize("wrapper", ["keywords", "peft"])
@pytest.mark.parametrize("family", ["GPT-2", "T5"])
def test_generation_around_steps(family: str, wrapper: str) -> None:
    """generate has its cache, before steps and after them; a loop by hand too."""
    eager = WRAPPERS[wrapper](FAMILIES[family](), family)
    ours = onward.accelerate(copy.deepcopy(eager))
    given = batch(family, labels=False)
    ids = {k: v for k, v in given.items() if k != "decoder_input_ids"}
    for _ in range(2):
        outs = []
        for m in (ours, eager):
            lm = m.lm if wrapper == "keywords" else m
            m.eval()
            made = lm.generate(**ids, max_new_tokens=4, do_sample=False)
            m.train()
            m(**batch(family, labels=True)).loss.backward()
            outs.append(made)
        assert torch.equal(outs[0], outs[1])
    held = accelerated(ours)
    assert held is not None and held.plan.launches
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", EagerWarning)
        key = "decoder_input_ids" if family == "T5" else "input_ids"
        for m in (ours.eval(), eager.eval()):
            first = m(**given, use_cache=True)
            more = {
                **given,
                "attention_mask": torch.cat((given["attention_mask"], torch.ones(2, 1).long()), 1),
            }
            more = {**(given if family == "T5" else more), key: given[key][:, :1]}
            outs.append(m(**more, past_key_values=first.past_key_values).logits)
        torch.testing.assert_close(outs[-2], outs[-1])
