"""What a forward does beside its result: harmless, and then the numbers are eager's, or refused."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import onward

WIDTH, BATCH, TOKENS = 8, 3, 5
calls = 0  # of a forward that counts them here


class Net(nn.Module):
    """A linear layer and a loss, between which `step` comes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.n, self.held, self.table = 0, [], {"n": 0}
        self.kept: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.step(self.linear(x)), y)

    def step(self, h: torch.Tensor) -> torch.Tensor:
        return h


class Config:
    n = 0


class Counts(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return h * self.n


class CountsNow(Net):
    """Nothing is seen of it in the first 100 steps."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return h * 2 if self.n > 100 else h


class CountsInATable(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.table["n"] += 1
        return h * self.table["n"]


class CountsInAConfig(Net):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.config.n += 1
        return h * self.config.n


class CountsInTheClass(Net):
    times = 0

    def step(self, h: torch.Tensor) -> torch.Tensor:
        type(self).times += 1
        return h * self.times


class CountsInAGlobal(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        global calls
        calls += 1
        return h * calls


class CountsBelow(Net):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Counts()

    def step(self, h: torch.Tensor) -> torch.Tensor:
        return self.inner.step(h)


class Flips(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.n = 1 - self.n
        return h if self.n else -h


class Appends(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.held.append(h.shape)
        return h


class Remembers(Net):
    """Reads what the last step has left."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        before, self.kept = self.kept, h.detach()
        return h if before is None else h + before


class RemembersInAList(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        before, self.held[:] = list(self.held), [h.detach()]
        return h + before[0] if before else h


class Draws(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        return h if random.random() < 0.5 else -h


class DrawsFromNumpy(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        return h * float(np.random.rand())


class Reenters(Net):
    """Below a reentrant checkpoint, gradients do not belong to the graph that is traced."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        return checkpoint(torch.tanh, h, use_reentrant=True) + h  # type: ignore[operator]


class Stores(Net):
    """The last output, and a dict of more of them, for others to look at."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.kept, self.seen = h, {"h": h, "n": len(h.shape)}
        return h


class Lends(Net):
    """A tensor from one module to another, within the step."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.linear.kept = h.tanh()  # type: ignore[assignment]
        return h * self.linear.kept  # type: ignore[operator]


class Tabulates(Net):
    """A table made once, for as many tokens as there were."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        if self.kept is None or self.n < h.shape[1]:
            self.n = int(h.shape[1])
            self.kept = torch.arange(self.n)[:, None] * torch.ones(WIDTH)
        return h * self.kept[: h.shape[1]]


class SetsOnce(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.scale = h.shape[-1] ** -0.5
        return h * self.scale


class SetsTheSame(Net):
    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.scale = 1.0 / float(h.shape[-1])
        return h * self.scale


class SetsAConfigOnce(Net):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.config.n = 3
        return h * self.config.n


class SetsADeepConfig(Net):
    """Below what is put back: the model is captured once more."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.config.inner = Config()  # type: ignore[attr-defined]

    def step(self, h: torch.Tensor) -> torch.Tensor:
        self.config.inner.n = 3  # type: ignore[attr-defined]
        return h * self.config.inner.n  # type: ignore[attr-defined]


class Sorts(Net):
    """Draws, and puts the generator back."""

    def step(self, h: torch.Tensor) -> torch.Tensor:
        before = random.getstate()
        random.seed(0)
        factor = random.random()
        random.setstate(before)
        return h * factor


REFUSED = [
    Counts, CountsNow, CountsInATable, CountsInAConfig, CountsInTheClass, CountsInAGlobal,
    CountsBelow, Flips, Appends, Remembers, RemembersInAList, Draws, DrawsFromNumpy, Reenters,
]  # fmt: skip
HARMLESS = [
    Stores,
    Lends,
    Tabulates,
    SetsOnce,
    SetsTheSame,
    SetsAConfigOnce,
    SetsADeepConfig,
    Sorts,
]


def batches() -> list[dict[str, torch.Tensor]]:
    shapes = [(BATCH, TOKENS, WIDTH), (BATCH, TOKENS + 2, WIDTH), (BATCH, TOKENS, WIDTH)]
    return [{"x": torch.randn(*s), "y": torch.randn(*s)} for s in shapes]


def trainer_of(model: nn.Module) -> onward.Trainer:
    return onward.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))


@pytest.mark.sample(2)
@pytest.mark.parametrize("evaluates", [False, True], ids=["train", "eval"])
@pytest.mark.parametrize("cls", REFUSED, ids=lambda c: c.__name__)
def test_what_the_next_run_would_do_differently_is_refused(cls: type[Net], evaluates: bool) -> None:
    if evaluates and cls is Reenters:
        pytest.skip("without gradients it computes the same")
    model = cls()
    before = [p.detach().clone() for p in model.parameters()]
    held = (model.n, list(model.held), dict(model.table), model.kept)
    trainer = trainer_of(model)
    for batch in batches()[:2]:  # a second time too
        with pytest.raises(onward.OnwardError, match=r"the forward |use_reentrant"):
            (trainer.eval_step if evaluates else trainer.train_step)(batch)
    assert (model.n, list(model.held), dict(model.table), model.kept) == held
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("cls", HARMLESS, ids=lambda c: c.__name__)
def test_what_changes_nothing_trains_as_in_eager(cls: type[Net]) -> None:
    def losses(step: Any) -> list[float]:
        return [float(step(batch)) for batch in given]

    given = batches()
    torch.manual_seed(0)
    model = cls()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def eager(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    want = losses(eager)
    torch.manual_seed(0)
    trainer = trainer_of(cls())
    assert losses(lambda b: trainer.train_step(b).loss) == pytest.approx(want, rel=1e-5)


def test_no_tensor_of_the_trace_stays_in_the_model() -> None:
    model = Stores()
    trainer = trainer_of(model)
    trainer.train_step(batches()[0])
    assert model.kept is None and not hasattr(model, "seen")
    assert any("kept" in note and "seen" in note for note in trainer.report()["notes"])


@pytest.mark.parametrize("cls", [SetsOnce, SetsAConfigOnce])
def test_numbers_that_a_forward_sets_stay_as_in_eager(
    cls: type[Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    import onward.compile

    plain, captures = onward.compile.capture, []

    def counted(*args: Any, **kwargs: Any) -> Any:
        captures.append(1)
        return plain(*args, **kwargs)

    monkeypatch.setattr(onward.compile, "capture", counted)
    model = cls()
    trainer = trainer_of(model)
    for batch in batches():
        trainer.train_step(batch)
    assert len(captures) == 1
    twin = cls()
    twin(**batches()[0])
    assert getattr(model, "scale", None) == getattr(twin, "scale", None)
    assert getattr(model, "config", Config()).n == getattr(twin, "config", Config()).n


def test_random_numbers_of_another_thread_are_no_matter() -> None:
    ends = threading.Event()

    def draw() -> None:
        while not ends.wait(0.02):
            random.random()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        trainer_of(Net()).train_step(batches()[0])
    finally:
        ends.set()
        thread.join()


# ---- nn.TransformerEncoder, which leaves out hidden tokens in evaluation

LENGTHS = torch.tensor([5, 3, 1])
PLACES = torch.arange(TOKENS)[None]
HIDDEN = {
    "behind": LENGTHS[:, None] <= PLACES,
    "before": (TOKENS - LENGTHS)[:, None] > PLACES,
    "within": (LENGTHS[:, None] <= PLACES) ^ (PLACES == TOKENS - 1),
    "none": torch.zeros(BATCH, TOKENS, dtype=torch.bool),
}
STACKS: dict[str, dict[str, Any]] = {
    "plain": {}, "norm": {"norm": True}, "no nested tensor": {"enable_nested_tensor": False},
    "odd heads": {"heads": 1}, "frozen": {"frozen": True}, "causal": {"causal": True},
    "always in evaluation": {"frozen": True, "asleep": True},
    "embedding frozen too": {"frozen": True, "asleep": True, "all": True, "norm": True},
}  # fmt: skip


class Encodes(nn.Module):
    def __init__(
        self, norm: bool = False, heads: int = 2, frozen: bool = False, causal: bool = False,
        asleep: bool = False, enable_nested_tensor: bool = True, all: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, heads, 16, dropout=0.0, batch_first=True)
        last = nn.LayerNorm(WIDTH) if norm else None  # which is not copied
        nest = enable_nested_tensor and heads % 2 == 0
        self.encoder = nn.TransformerEncoder(layer, 2, last, enable_nested_tensor=nest)
        if last is not None:
            nn.init.normal_(last.bias)
        self.head = nn.Linear(WIDTH, WIDTH)
        self.causal, self.asleep = causal, asleep
        self.encoder.requires_grad_(not frozen)
        self.embed.requires_grad_(not all)

    def train(self, mode: bool = True) -> Encodes:
        super().train(mode)
        self.encoder.train(mode and not self.asleep)
        return self

    def forward(self, x: torch.Tensor, y: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.causal else None
        h = self.encoder(self.embed(x), mask, src_key_padding_mask=hidden)
        return F.mse_loss(self.head(h), y)


@pytest.mark.sample(6)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("floats", [False, True], ids=["bool", "float"])
@pytest.mark.parametrize("side", HIDDEN)
@pytest.mark.parametrize("stack", STACKS)
def test_hidden_tokens_of_an_encoder_are_eagers(stack: str, side: str, floats: bool) -> None:
    hidden = HIDDEN[side]
    if STACKS[stack].get("causal") and side == "before":
        pytest.skip("the first tokens see nothing, for which torch's fast path has NaN")
    if floats or STACKS[stack].get("causal"):
        hidden = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
    given = [{**b, "hidden": hidden} for b in batches()[::2]]
    torch.manual_seed(0)
    model = Encodes(**STACKS[stack]).train()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    want: list[float] = []
    for batch in given:
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            want += [loss.item(), model.eval()(**batch).item()]
        model.train()
    torch.manual_seed(0)
    model = Encodes(**STACKS[stack]).train()
    trained = [p for p in model.parameters() if p.requires_grad]
    trainer = onward.Trainer(model, torch.optim.SGD(trained, lr=0.1))
    have: list[float] = []
    for batch in given:
        have += [float(trainer.train_step(batch).loss), float(trainer.eval_step(batch).loss)]
    assert have == pytest.approx(want, rel=2e-5)
