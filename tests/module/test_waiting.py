"""Outputs that wait: a Hugging Face output's fields, computed when they are read; generation."""

from __future__ import annotations

import copy
import pickle  # noqa: TID251
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions
from twins import CLOSE, Twins

import onward
from onward import EagerWarning, OnwardError
from onward.module import accelerated

V = 61


def gpt2(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    config = GPT2Config(
        vocab_size=V, n_layer=1, n_embd=16, n_head=2, n_positions=32, bos_token_id=0,
        eos_token_id=None, pad_token_id=0, **drops,
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def ids(seed: int = 0, rows: int = 2, length: int = 7) -> torch.Tensor:
    return torch.randint(1, V, (rows, length), generator=torch.Generator().manual_seed(seed))


def call(model: Any, seed: int = 0) -> Any:
    return model(input_ids=ids(seed), labels=ids(seed), use_cache=False)


def unread(twins: Twins, calls: int = 3) -> tuple[Any, Any]:
    """Outputs of both models after some calls of which only the loss was read."""
    for i in range(calls):
        for output in twins.each(lambda m, i=i: call(m, i)):
            output.loss.backward()
    return twins.each(lambda m: call(m, 9))


def computed(model: Any) -> set[str]:
    """The results that the last forward has computed."""
    held = accelerated(model)
    assert held is not None and held._last is not None and held._last.last is not None
    return set(held._last.last.prepared.signature.results)


READS: dict[str, Callable[[Any], Any]] = {
    "attribute": lambda o: o.logits,
    "item": lambda o: o["logits"],
    "position": lambda o: o[1],
    "slice": lambda o: o[:2],
    "get": lambda o: o.get("logits"),
    "values": lambda o: list(o.values()),
    "items": lambda o: list(o.items()),
    "to_tuple": lambda o: o.to_tuple(),
    "dict": dict,
    "unpacked": lambda o: dict(**o),
    "getattr": lambda o: getattr(o, "logits", None),
    "copy": lambda o: copy.copy(o).logits,
    "pytree": lambda o: pytree.tree_leaves(o),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("read", READS)
def test_a_field_that_is_read_late_is_eager_s(read: str) -> None:
    ours, eager = unread(twins := Twins(gpt2()))
    assert "logits" not in computed(twins.ours)
    found, want = READS[read](ours), READS[read](eager)
    a, b = pytree.tree_leaves(found), pytree.tree_leaves(want)
    for x, y in zip(a, b, strict=True):
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(x, y, **CLOSE)
        else:
            assert x == y


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_late_field_is_of_the_same_forward(dropout: float) -> None:
    """A field computed late has the same dropout masks as the loss."""
    twins = Twins(gpt2(dropout))
    ours, _ = unread(twins)
    loss = torch.nn.functional.cross_entropy(
        ours.logits[:, :-1].reshape(-1, V), ids(9)[:, 1:].reshape(-1)
    )
    torch.testing.assert_close(loss, ours.loss, **CLOSE)


def test_a_late_field_has_gradients() -> None:
    twins = Twins(gpt2())
    ours, eager = unread(twins)
    twins.zero()
    for output in (ours, eager):
        (output.loss + output.logits.sin().mean()).backward()
    twins.same_gradients()


def test_the_first_callers_tell_what_is_computed() -> None:
    model: Any = onward.accelerate(gpt2())
    call(model).loss.backward()
    assert computed(model) == {"loss", "logits"}, "the first call is given all"
    for i in range(3):
        call(model, i).loss.backward()
    assert computed(model) == {"loss"}
    _ = call(model).logits
    for _ in range(2):
        output = call(model)
        assert computed(model) == {"loss", "logits"}, "a caller before has read them"
        _ = output.logits


def test_a_field_read_after_the_update_raises() -> None:
    twins = Twins(gpt2())
    ours, _ = unread(twins)
    with torch.no_grad():
        twins.ours.transformer.wte.weight.add_(0.1)
    with pytest.raises(OnwardError, match=r'logits was left out of the forward.*outputs="all"'):
        _ = ours.logits


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_field_read_after_an_update_through_data_raises(dropout: float) -> None:
    """Writes through `.data` raise no version counter."""
    twins = Twins(gpt2(dropout))
    ours, _ = unread(twins)
    ours.loss.backward()
    for p in twins.ours.parameters():
        p.data.add_(p.grad, alpha=-1.0)
    with pytest.raises(OnwardError, match="logits was left out of the forward"):
        _ = ours.logits


def test_a_field_read_after_its_batch_was_written_by_numpy_raises() -> None:
    ours = onward.accelerate(gpt2())
    for i in range(3):
        call(ours, i).loss.backward()
    array = ids(9).numpy().copy()
    shared = torch.from_numpy(array)
    output: Any = ours(input_ids=shared, labels=shared, use_cache=False)
    array[:] = ids(10).numpy()
    with pytest.raises(OnwardError, match="logits was left out of the forward"):
        _ = output.logits


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_field_is_read_after_the_user_has_written_into_the_loss(dropout: float) -> None:
    twins = Twins(gpt2(dropout))
    ours, _ = unread(twins)
    loss = ours.loss.detach().clone()
    ours.loss.div_(2)
    found = torch.nn.functional.cross_entropy(
        ours.logits[:, :-1].reshape(-1, V), ids(9)[:, 1:].reshape(-1)
    )
    torch.testing.assert_close(found, loss, **CLOSE)
    torch.testing.assert_close(ours.loss, loss / 2, **CLOSE)


@pytest.mark.parametrize("read", [True, False])
def test_the_output_is_the_model_s_own(read: bool) -> None:
    ours, eager = unread(Twins(gpt2()))
    assert isinstance(ours, CausalLMOutputWithCrossAttentions)
    assert type(ours).__name__ == type(eager).__name__
    assert list(ours.keys()) == list(eager.keys()) and len(ours) == len(eager)
    assert "logits" in ours and "nothing" not in ours and hasattr(ours, "logits")
    if read:
        _ = ours.logits
        assert type(ours) is CausalLMOutputWithCrossAttentions
    for copied in (pickle.loads(pickle.dumps(detached(ours))), copy.deepcopy(detached(ours))):
        assert type(copied) is CausalLMOutputWithCrossAttentions
        torch.testing.assert_close(copied.logits, eager.logits.detach(), **CLOSE)


def detached(output: Any) -> Any:
    """The output with its loss and logits detached, as a user who keeps it makes it."""
    output.loss, output.logits = output.loss.detach(), output.logits.detach()
    return output


def test_a_field_that_was_set_is_what_was_set() -> None:
    ours, _ = unread(Twins(gpt2()))
    ours.logits = torch.ones(2)
    assert ours.logits.tolist() == ours["logits"].tolist() == [1.0, 1.0]
    assert type(ours) is CausalLMOutputWithCrossAttentions


@pytest.mark.parametrize("outputs", ["loss", "all"])
def test_the_option(outputs: str) -> None:
    twins = Twins(gpt2(), outputs=outputs)
    ours, eager = unread(twins)
    assert type(ours) is CausalLMOutputWithCrossAttentions
    torch.testing.assert_close(ours.loss, eager.loss, **CLOSE)
    if outputs == "loss":
        assert ours.logits is None and computed(twins.ours) == {"loss"}
    else:
        assert computed(twins.ours) == {"loss", "logits"}
        torch.testing.assert_close(ours.logits, eager.logits, **CLOSE)


def test_evaluation_reads_what_training_does_not() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=V, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    twins = Twins(BertForMaskedLM(config).eval())
    for i in range(4):
        for output in twins.each(lambda m, i=i: m(input_ids=ids(i), labels=ids(i))):
            output.loss.backward()
        with torch.no_grad():
            ours, eager = twins.each(lambda m, i=i: m(input_ids=ids(i)))
        torch.testing.assert_close(ours.logits, eager.logits, **CLOSE)
    twins.same_gradients()


def test_two_threads_read_one_output() -> None:
    ours, eager = unread(Twins(gpt2()))
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(ours.logits)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    for logits in found:
        torch.testing.assert_close(logits, eager.logits, **CLOSE)


def test_generation_runs_in_eager_and_says_so_once() -> None:
    twins = Twins(gpt2().eval())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for i in range(2):
            ours, eager = twins.each(
                lambda m, i=i: m.generate(
                    ids(i),
                    attention_mask=torch.ones_like(ids(i)),
                    max_new_tokens=5,
                    do_sample=False,
                )
            )
            assert ours.tolist() == eager.tolist()
    told = [w for w in said if issubclass(w.category, EagerWarning)]
    assert len(told) == 1 and "cache of keys and values" in str(told[0].message)
    for output in twins.each(lambda m: call(m.train())):
        output.loss.backward()
    assert twins.ran()
    twins.same_gradients()


def test_a_saved_model_is_a_model(tmp_path: Path) -> None:
    twins = Twins(gpt2())
    call(twins.ours).loss.backward()
    twins.ours.save_pretrained(tmp_path)
    loaded: Any = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert list(loaded.state_dict()) == list(twins.eager.state_dict())
    for a, b in zip(loaded.parameters(), twins.eager.parameters(), strict=True):
        assert torch.equal(a, b)
    assert accelerated(loaded) is None
