"""Programs that mask, pool and ignore rows: whatever the spelling, the numbers are eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
import transformers as hf
from row_programs import (
    Batch,
    Model,
    Parts,
    Program,
    Stage,
    batch,
    filling,
    pooled,
    product,
    program,
    tokens,
    wrong_numbers,
)
from tiny_families import BERT, assert_same, of
from torch import Tensor, nn

import onward
from onward import OnwardError
from onward.rewrite.rows import packer, sets

KINDS = ("ragged", "holes", "full", "empty")


def data(seed: int = 0) -> list[dict[str, Any]]:
    return [batch(seed + n, kind) for n, kind in enumerate(KINDS)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", [3, 17, 26, 33, 58])
def test_random_programs(seed: int) -> None:
    made = program(seed)
    assert not wrong_numbers(made, data(seed)), str(made)


# ---- families


def _of(name: str, *stages: Stage, loss: Callable[[Parts, Tensor, Batch], Tensor]) -> Program:
    return Program((name,), stages, loss)


POOLED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    # pooling functions of h f[B,T,D], the mask m i64[B,T], and the mask as b[B,T,1]
    "sum": lambda h, m, b: h.masked_fill(m[..., None] == 0, 0.0).sum(1),
    "mean": lambda h, m, b: h.masked_fill(m[..., None] == 0, 0.0).mean(1),
    "ratio": lambda h, m, b: h.masked_fill(~b, 0.0).sum(1) / m.sum(1, keepdim=True).clamp(min=1),
    "filled with -1": lambda h, m, b: h.masked_fill(m[..., None] == 0, -1.0).sum(1),
    "where m == 0": lambda h, m, b: torch.where(m[..., None] == 0, 0.0, h).sum(1),
    "where m": lambda h, m, b: torch.where(b, h, 0.0).sum(1),
    "where not m": lambda h, m, b: torch.where(~b, 0.5, h).sum(1),
    "first of filled": lambda h, m, b: h.masked_fill(m[..., None] == 0, 0.0)[:, 0],
    "max": lambda h, m, b: h.masked_fill(m[..., None] == 0, -1e4).amax(1),
    "product": lambda h, m, b: (h * m[..., None]).sum(1),
    "product with 1 - m": lambda h, m, b: (h * (1 - m[..., None].float())).sum(1),
    "masked twice": lambda h, m, b: (h.masked_fill(~b, 0.0) * b.float()).masked_fill(b, 1.0).sum(1),
}  # fmt: skip


def _pooling(name: str) -> Program:
    def loss(p: Parts, h: Tensor, d: Batch) -> Tensor:
        h = torch.tanh(p.inner[0](h))
        vector = POOLED[name](h, d["mask"], d["mask"].bool().unsqueeze(-1))
        return F.cross_entropy(p.head(vector), d["classes"])

    return _of(name, loss=loss)


def _token_loss(p: Parts, h: Tensor, d: Batch) -> Tensor:
    return tokens(p, h, d["labels"])


def _every_token(p: Parts, h: Tensor, d: Batch) -> Tensor:
    return tokens(p, h, d["tags"], ignore_index=0)


SMALLEST: dict[str, Program] = {
    "filled rows count": _of("", filling("bool()", "where"), loss=_every_token),
    "filled where taken": _of("", filling("ge(1)", "fill taken"), loss=_token_loss),
    "1 - the negation": _of("", product("1 - (~ge(1)).float()", "times"), loss=_token_loss),
    "two masks in a row": _of(
        "", filling("types", "fill"), filling("~(== 0)", "where left"), loss=_token_loss
    ),
    "the other side": _of(
        "", filling("eq(0).logical_not()", "other first"), loss=pooled("sum", "bool()", "float()")
    ),
    "a loss for each, then all": _of(
        "", loss=lambda p, h, d: (
            F.cross_entropy(p.head(h).flatten(0, 1), d["labels"].flatten(), reduction="none")
            + h.sum(-1).flatten()
        ).square().mean(),
    ),
    "what stops gradients": _of(
        "", loss=lambda p, h, d: tokens(
            p, h * h.detach().abs().mean(-1, keepdim=True) + h.detach(), d["labels"]
        ),
    ),
    "labels under a where": _of(
        "", loss=lambda p, h, d: tokens(p, h, torch.where(d["real"], d["tags"], -100))
    ),
}  # fmt: skip
FAMILIES = {**{f"pooled, {n}": _pooling(n) for n in POOLED}, **SMALLEST}


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name: str) -> None:
    wrong = wrong_numbers(FAMILIES[name], data())
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", ["first of filled", "where m == 0"])
@pytest.mark.parametrize("training", [True, False])
def test_a_trainer_steps_as_eager_does(name: str, training: bool) -> None:
    model = Model(_pooling(name))
    twin = copy.deepcopy(model)
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.1))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for given in data():
        step = trainer.train_step if training else trainer.eval_step
        have = step(**given).loss
        want = twin(**given)
        torch.testing.assert_close(have, want.detach(), rtol=1e-5, atol=1e-6)
        if training:
            optimizer.zero_grad()
            want.backward()
            optimizer.step()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


# ---- whole models


class MeanOfReal(nn.Module):
    """BERT with a head on the mean of its real tokens, which a fill masks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bert = hf.BertModel(hf.BertConfig(**BERT), add_pooling_layer=False)
        self.head = nn.Linear(BERT["hidden_size"], 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        real = attention_mask.unsqueeze(-1)
        total = hidden.masked_fill(real == 0, 0.0).sum(1)
        return F.cross_entropy(self.head(total / real.sum(1)), labels)


class Denoised(nn.Module):
    """BERT with zeros for the embeddings of masked tokens, as ESM's token dropout has them."""

    def __init__(self) -> None:
        super().__init__()
        self.model: Any = of("Bert", "MaskedLM", num_hidden_layers=2)()

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Tensor:
        masked = input_ids == 3
        hidden = self.model.bert.embeddings.word_embeddings(input_ids)
        hidden = hidden.masked_fill(masked.unsqueeze(-1), 0.0)
        observed = masked.sum(-1).float() / attention_mask.sum(-1)
        hidden = hidden * (1 - 0.15 * 0.8) / (1 - observed)[:, None, None]
        return self.model(inputs_embeds=hidden, attention_mask=attention_mask, labels=labels).loss


def esm() -> nn.Module:
    torch.manual_seed(0)
    config = hf.EsmConfig(
        vocab_size=tiny.VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=64, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, pad_token_id=1, mask_token_id=3, token_dropout=True,
        position_embedding_type="absolute",
    )  # fmt: skip
    return tiny.ready(hf.EsmForMaskedLM(config))


def masked_batch(classes: bool = False) -> tiny.Tensors:
    given = tiny.batch(4, 12, "right", ignored=True)
    given["input_ids"][:, 2::4] = 3
    given["input_ids"][given["attention_mask"] == 0] = 1
    return {**given, "labels": torch.tensor([0, 1, 2, 0])} if classes else given


MODELS: dict[str, tuple[Callable[[], nn.Module], tiny.Tensors]] = {
    "BERT, mean of real tokens": (lambda: tiny.ready(MeanOfReal()), masked_batch(classes=True)),
    "token dropout": (Denoised, masked_batch()),
    "ESM": (esm, masked_batch()),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    make, given = MODELS[name]
    model = make()
    found, counts = tiny.packed_gradients(model, given)
    assert_same([found], model, [given])
    assert any(n < given["input_ids"].numel() for n in counts.values())


# ---- ONWARD_CHECK: NaN in the rows that are left out


def _step(made: Program, given: dict[str, Any]) -> Tensor:
    trainer = onward.Trainer(Model(made), onward.optim.SGD(lr=0.1))
    loss = trainer.train_step(**given).loss
    trainer.eval_step(**given)
    assert trainer.report()["rows"]["arithmetic_done"] < 1, "no row was left out"
    return loss


WATCHED = (
    "pooled, where m == 0",
    "filled rows count",
    "the other side",
    "a loss for each, then all",
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", WATCHED)
def test_nan_in_unread_rows_arrives_nowhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_CHECK", "1")
    assert _step(FAMILIES[name], batch(1)).isfinite()


class RowOfAnother(nn.Module):
    """The first token is replaced by another of its sequence; the labels say which are read. With
    NaN in what is left out the graph has fewer sets of rows than the step."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 4)

    def forward(self, ids: Tensor, at: Tensor, y: Tensor) -> Tensor:
        h = self.words(ids) * 0.5
        first = h.gather(1, at[:, None, None].expand(-1, 1, 4))
        h = torch.cat([first, (1.5 - h)[:, 1:]], 1)
        return F.cross_entropy((h @ self.words.weight.T).flatten(0, 1), y.flatten())


class WeightsMaskedTwice(nn.Module):
    """Attention whose first query may see no key; what its weights of 0 meet is not read."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        h = self.words(ids)
        q, k, v = self.q(h), self.k(h), self.v(h)
        seen = (mask == 0)[:, None, :] & torch.ones(2, 2).tril().bool()
        scores = (q @ k.mT).masked_fill(~seen, -1e9)
        return ((scores.softmax(-1) * seen) @ v)[:, 0].square().mean()


ODD: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor]]] = {
    "a row of another": (RowOfAnother, {
        "ids": torch.tensor([[9, 7, 2, 9, 4], [1, 1, 3, 8, 6], [9, 5, 3, 9, 6]]),
        "at": torch.tensor([4, 4, 1]),
        "y": torch.tensor([[5, -100, 5, -100, -100], [-100] * 5, [-100, -100, -100, -100, 5]]),
    }),
    "weights masked twice": (WeightsMaskedTwice, {
        "ids": torch.tensor([[9, 7], [5, 6], [3, 5], [4, 0]]),
        "mask": torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]]),
    }),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_nan_is_where_the_step_itself_leaves_rows_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONWARD_CHECK", "1")
    make, given = ODD[name]
    torch.manual_seed(0)
    trainer = onward.Trainer(make(), onward.optim.SGD(lr=0.1))
    assert trainer.train_step(given).loss.isfinite()
    assert trainer.eval_step(given).loss.isfinite()
    assert trainer.report()["rows"]["arithmetic_done"] < 1, "no row was left out"


def test_nan_of_the_batch_itself_is_no_alarm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ONWARD_CHECK", "1")
    assert _step(FAMILIES["filled where taken"], batch(1, "empty")).isnan()


def _sides_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = sets.test
    monkeypatch.setattr(
        sets, "test", lambda value, number=0, equal=False: plain(value, number, not equal)
    )


def _too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packer.sets, "covers", lambda outer, inner: True)


@pytest.mark.parametrize("plant", [_sides_exchanged, _too_small])
def test_what_reads_unread_rows_is_named(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two faults of the analysis: a `where` that reads the other side, a set that lacks rows."""
    monkeypatch.setenv("ONWARD_CHECK", "1")
    plant(monkeypatch)
    with pytest.raises(OnwardError, match=r"row demand: \w+ at .* left out as unread.*fix:"):
        _step(FAMILIES["filled rows count"], batch(1))


# ---- ids at rows that nobody reads


@pytest.mark.sample(3)
@pytest.mark.parametrize("leaf", ["input_ids", "token_type_ids", "position_ids"])
@pytest.mark.parametrize("bad", [1000, -1])
def test_ids_of_unread_rows_are_refused_as_in_eager(leaf: str, bad: int) -> None:
    model = of("Bert", "MaskedLM", num_hidden_layers=1)()
    given = tiny.batch(4, 12, "right", ignored=True)
    given["token_type_ids"] = torch.zeros_like(given["input_ids"])
    given["position_ids"] = torch.arange(12).repeat(4, 1)
    trainer = onward.Trainer(model, onward.optim.SGD(lr=0.1))
    trainer.train_step(given)
    assert trainer.report()["rows"]["arithmetic_done"] < 1
    wrong = {**given, leaf: given[leaf].masked_fill(given["attention_mask"] == 0, bad)}
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(IndexError):
        model(**wrong)
    with pytest.raises(IndexError):
        trainer.train_step(wrong)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert trainer.train_step(given).loss.isfinite()


class Numbered(nn.Module):
    """A model that indexes rows of a parameter and of a sequence by numbers, negative ones
    included."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(11, 6))
        self.out = nn.Linear(6, 6)

    def forward(
        self, ids: torch.Tensor, places: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        h = self.out(self.table[ids])
        flat = h.flatten(0, 1)
        picked = flat[places] + h[torch.arange(h.shape[0]), places] + self.table[torch.tensor(-1)]
        loss = F.cross_entropy(flat, labels.flatten()) + picked.square().mean()
        return {"loss": loss}


@pytest.mark.parametrize("disable", [(), ("row_demand",)], ids=["rows", "all"])
@pytest.mark.parametrize("level", ["", "0"], ids=["native", "aten"])
def test_rows_are_numbered_from_the_end_as_in_eager(
    level: str, disable: tuple[str, ...], build: Callable[[str], None]
) -> None:
    if level:
        build(level)
    model = Numbered()
    twin, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = onward.Trainer(model, optimizer, options={"disable": disable})
    labels = torch.full((3, 4), -100)
    labels[:, 1] = torch.tensor([2, 0, 5])
    given = {
        "ids": torch.tensor([[1, 2, -1, 4], [3, -2, 5, 6], [7, -11, 9, 10]]),
        "places": torch.tensor([-1, 0, -4]), "labels": labels,
    }  # fmt: skip
    found = trainer.train_step(given)
    want = twin(**given)["loss"]
    want.backward()
    torch.testing.assert_close(found.loss, want.detach(), rtol=1e-5, atol=1e-6)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert q.grad is not None
        torch.testing.assert_close(p.detach(), q.detach() - q.grad, rtol=1e-5, atol=1e-6)
    for name, bad in (("ids", 11), ("ids", -12), ("places", -13)):
        wrong = {**given, name: given[name].clone()}
        wrong[name].view(-1)[0] = bad
        with pytest.raises(IndexError):
            twin(**wrong)
        with pytest.raises(IndexError):
            trainer.train_step(wrong)
