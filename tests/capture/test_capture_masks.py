"""The masks of Hugging Face models while they are captured: what eager PyTorch has, or refused."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers as hf
from tiny_families import BART, BERT, LLAMA, T5, assert_same
from torch import nn
from transformers import masking_utils
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention

import onward
from onward.capture import CaptureRequest, capture
from onward.capture.huggingface import attention_kept_whole
from onward.capture.huggingface.plain_attention import _forms
from onward.errors import CaptureError
from onward.graph.graph import type_of
from onward.options import TrainerOptions

IMPLEMENTATIONS = ("sdpa", "eager")
GPT2 = {"n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 64, "vocab_size": 97,
        "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "bos_token_id": 0,
        "eos_token_id": 0, "use_cache": False}  # fmt: skip


# ---- a mask is what eager has, whoever reads it


MASKS: dict[str, Callable[..., Any]] = {
    "causal": masking_utils.create_causal_mask,
    "bidirectional": masking_utils.create_bidirectional_mask,
    "window": masking_utils.create_sliding_window_causal_mask,
}


def padding(side: str, size: int) -> torch.Tensor | None:
    if side == "none":
        return None
    mask = torch.ones(size, 6, dtype=torch.long)
    mask[0, slice(4, 6) if side == "right" else slice(0, 2) if side == "left" else slice(0, 6)] = 0
    return mask


@pytest.mark.parametrize("size", [3, 6], ids=["three rows", "as many rows as tokens"])
@pytest.mark.parametrize("side", ["none", "right", "left", "all"])
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_whoever_reads_a_mask_himself_finds_eagers(
    implementation: str, kind: str, side: str, size: int
) -> None:
    settings = {**LLAMA, "sliding_window": 3, "attn_implementation": implementation}
    config = hf.LlamaConfig(**settings)
    model = hf.LlamaModel(config)
    given: dict[str, Any] = {
        "config": config, "inputs_embeds": torch.zeros(size, 6, 32),
        "attention_mask": padding(side, size), "past_key_values": None,
    }  # fmt: skip
    want = MASKS[kind](**given)
    with attention_kept_whole(model, own_positions=False):
        have = MASKS[kind](**given)
    if want is None:
        assert have is None
    else:
        assert have.dtype == want.dtype
        assert torch.equal(have, want)
    again = MASKS[kind](**given)
    assert (again is None) == (want is None)


class ByHand(nn.Module):
    """A model whose own attention adds the masks of `masking_utils` to its scores as they come."""

    def __init__(self, implementation: str, change: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        settings = {**LLAMA, "attn_implementation": implementation}
        self.config = hf.LlamaConfig(**settings)
        self.embed = nn.Embedding(97, 32)
        self.inner: Any = hf.LlamaModel(self.config).layers[0].self_attn
        self.rotary = hf.LlamaModel(self.config).rotary_emb
        self.change = change

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        mask = masking_utils.create_causal_mask(
            config=self.config, inputs_embeds=x, attention_mask=attention_mask,
            past_key_values=None,
        )  # fmt: skip
        assert mask is not None
        if self.change == "written":
            mask = mask.clone()
            mask[:, :, :, 0] = 0
        added = mask if mask.is_floating_point() else torch.where(mask, 0.0, -1e4)
        scores = x @ x.transpose(1, 2) + added[:, 0]
        y = scores.softmax(-1) @ x
        places = torch.arange(x.shape[1])[None]
        z, _ = self.inner(x, self.rotary(x, places), mask)
        return (y * z).square().mean()


@pytest.mark.sample(8)
@pytest.mark.parametrize("side", ["right", "left", "all"])
@pytest.mark.parametrize("change", ["", "written"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_mask_read_by_hand_and_by_attention(implementation: str, change: str, side: str) -> None:
    """Model and attention share one config, and the batch has as many rows as tokens."""
    model = ByHand(implementation, change).train()
    data = {"input_ids": tiny.tokens(6, 6), "attention_mask": padding(side, 6)}
    want = tiny.eager(model, data, torch.float32)
    same(tiny.gradients(model, data), want)


def same(have: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    have = {n.replace("grad.param.", "grad."): t for n, t in have.items()}
    whole = float(torch.stack([t.norm() for t in want.values()]).norm())
    for name, truth in want.items():
        off = float((have[name] - truth).norm())
        assert off <= 2e-5 * float(truth.norm()) + 2e-6 * whole, f"{name}: {off} of {truth.norm()}"


# ---- which functions of transformers the hook stands for


@functools.cache
def eager_functions() -> dict[str, list[str]]:
    """The distinct texts of `eager_attention_forward` -> the families that have them."""
    found: dict[str, list[str]] = {}
    for file in sorted((Path(hf.__file__).parent / "models").glob("*/modeling_*.py")):
        text = file.read_text(encoding="utf-8")
        if "def eager_attention_forward" not in text:
            continue
        for node in ast.parse(text).body:
            if isinstance(node, ast.FunctionDef) and node.name == "eager_attention_forward":
                node.returns, node.decorator_list = None, []
                for argument in ast.walk(node.args):
                    if isinstance(argument, ast.arg):
                        argument.annotation = None
                found.setdefault(ast.unparse(node), []).append(file.parent.name)
    return found


def test_every_eager_attention_of_transformers_is_known_for_what_it_is(tmp_path: Path) -> None:
    """Forms with attention sinks, or that drop a mask, are traced as written; all others become one
    op."""
    functions = eager_functions()
    assert sum(map(len, functions.values())) > 50
    plain = odd = 0
    for number, (text, families) in enumerate(functions.items()):
        names: dict[str, Any] = {
            "torch": torch, "nn": nn, "F": nn.functional, "repeat_kv": repeat_kv,
        }  # fmt: skip
        source = tmp_path / f"f{number}.py"
        source.write_text(text)
        exec(compile(text, str(source), "exec"), names)
        forms = _forms(names["eager_attention_forward"])
        strange = "sinks" in text or "attention_mask" not in text.partition(":\n")[2]
        if strange:
            odd += 1
            assert not forms or "sinks=None" in text, families
        else:
            plain += bool(forms)
            assert ("bias" in forms) <= ("position_bias" in text)
    assert plain >= 5
    assert odd >= 1


# ---- rows of queries that see no key


def hidden(labels: bool = True) -> tiny.Tensors:
    """The second row is padding alone, the third is padded at the left; every label counts."""
    data = tiny.batch(4, 7)
    mask = torch.ones(4, 7, dtype=torch.long)
    mask[1], mask[2, :3], mask[3, 5:] = 0, 0, 0
    return {**data, "attention_mask": mask}


def four(kind: str) -> tiny.Tensors:
    """The padded batch with a mask of four dims, as a user may build it: of bools, or of floats to
    add."""
    data = hidden()
    mask = (data["attention_mask"][:, None, :] * torch.ones(7, 7)).tril(2)[:, None]
    if kind == "bool":
        return {**data, "attention_mask": mask.bool()}
    least = torch.finfo(torch.float32).min
    return {**data, "attention_mask": torch.zeros_like(mask).masked_fill(mask == 0, least)}


FAMILIES: dict[str, tuple[type, type, dict[str, Any]]] = {
    "BERT": (hf.BertForMaskedLM, hf.BertConfig, BERT),
    "BERT as a decoder": (hf.BertLMHeadModel, hf.BertConfig, {**BERT, "is_decoder": True,
                                                              "use_cache": False}),
    "GPT-2": (hf.GPT2LMHeadModel, hf.GPT2Config, GPT2),
    "Llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {**LLAMA, "num_key_value_heads": 2}),
    "T5": (hf.T5ForConditionalGeneration, hf.T5Config, {**T5, "num_layers": 1}),
    "BART": (hf.BartForConditionalGeneration, hf.BartConfig, BART),
}  # fmt: skip
KINDS: dict[str, Callable[[], tiny.Tensors]] = {
    "padding": hidden, "bools": lambda: four("bool"), "floats": lambda: four("float"),
    "decoder": lambda: {**hidden(), "decoder_attention_mask": hidden()["attention_mask"]},
}  # fmt: skip
HIDDEN = [
    (family, kind, implementation)
    for family in FAMILIES
    for implementation in IMPLEMENTATIONS
    for kind in KINDS
    if (kind != "bools" or implementation == "sdpa")  # the other is refused
    and (kind in ("padding", "decoder") or family in ("BERT", "GPT-2"))
    and (kind != "decoder" or family in ("T5", "BART"))
]


def made(family: str, implementation: str) -> Any:
    torch.manual_seed(0)
    cls, config, settings = FAMILIES[family]
    return tiny.ready(cls(config(**settings, attn_implementation=implementation)))


@pytest.mark.sample(20)
@pytest.mark.parametrize(("family", "kind", "implementation"), HIDDEN)
def test_rows_that_see_nothing_are_eagers(family: str, kind: str, implementation: str) -> None:
    """Rows that see no key follow a batch without such rows, whose capture may differ; with row
    demand and without."""
    data = KINDS[kind]()
    usual = {**data, **{k: torch.ones_like(v) for k, v in data.items() if "mask" in k}}
    if data["attention_mask"].is_floating_point():
        usual["attention_mask"] = torch.zeros_like(data["attention_mask"])
    for disable in ((), ("row_demand",)):
        model, twin = (made(family, implementation) for _ in range(2))
        trainer = onward.Trainer(
            model, onward.optim.SGD(lr=1.0), options=TrainerOptions(disable=disable)
        )
        for batch in (usual, data, usual):
            if batch is data and implementation == "sdpa" and (kind == "floats" or family == "T5"):
                with pytest.raises(CaptureError, match=r"may hide every key.*; fix: "):
                    trainer.train_step(batch)  # its gradient is not that of its loss
                continue
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            twin.load_state_dict(model.state_dict())
            want = tiny.eager(twin, batch, torch.float32)
            loss = trainer.train_step(batch).loss
            steps = {
                f"grad.{n}": before[n] - p.detach()
                for n, p in model.named_parameters() if f"grad.{n}" in want
            }  # fmt: skip
            same({"loss": loss, **steps}, want)


def test_the_usual_batch_keeps_its_compact_mask() -> None:
    """A batch with an empty row needs masks written out; the usual batch must not pay for that."""
    usual = {**hidden(), "attention_mask": torch.ones(4, 7, dtype=torch.long)}
    for family, compact_type in (("GPT-2", "b[B,1,1,T]"), ("BERT", "b[B,1,1,T]")):
        for data, compact in ((usual, True), (hidden(), False)):
            got = capture(CaptureRequest(made(family, "eager"), (), data))
            given = [[*n.inputs, None][3] for n in got.graph if n.op_type == "Attention"]
            types = [str(type_of(mask)) for mask in given if mask is not None]
            assert (compact_type in types) == compact
            assert (got.dims(list(hidden().values())) is None) == compact
            assert got.dims(list(usual.values())) is not None


def test_attention_that_is_causal_only_where_nothing_is_hidden_is_refused() -> None:
    model = made("GPT-2", "sdpa")
    model.get_submodule("transformer.h.0.attn").is_causal = False
    with pytest.raises(CaptureError, match=r"causal on a batch that hides no token.*; fix: "):
        capture(CaptureRequest(model, (), hidden()))


class OfFour(GPT2Attention):
    """GPT-2's attention as in transformers 4: it says is_causal only where it gets no mask."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        attention_mask = kwargs.get("attention_mask")
        is_causal = attention_mask is None and hidden_states.shape[1] > 1
        return super().forward(hidden_states, *args, is_causal=is_causal, **kwargs)


class Otherwise(GPT2Attention):
    """GPT-2's attention with is_causal=False: a batch that hides no token has no mask, so nothing
    makes it causal."""

    def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(hidden_states, *args, is_causal=False, **kwargs)


@pytest.mark.parametrize("kind", [OfFour, Otherwise])
def test_attention_that_is_causal_without_a_mask(kind: type[GPT2Attention]) -> None:
    model = made("GPT-2", "sdpa")
    model.get_submodule("transformer.h.0.attn").__class__ = kind
    whole = {**hidden(), "attention_mask": torch.ones(4, 7, dtype=torch.long)}
    padded = {**whole, "attention_mask": torch.ones(4, 7, dtype=torch.long).index_fill(
        1, torch.tensor([5, 6]), 0)}  # fmt: skip
    if kind is Otherwise:
        with pytest.raises(CaptureError, match=r"causal on a batch that hides no token.*; fix: "):
            capture(CaptureRequest(model, (), whole))
        return
    for batch in (whole, padded):
        compiled = tiny.compiled(model, batch)
        graph = compiled.differentiated(tiny.trained(compiled))
        wanted = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
        for given in (whole, padded):
            ours = tiny.plain(tiny.execute(compiled, graph, given, wanted))
            assert_same([ours], model, [given])
