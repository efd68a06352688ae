"""nn.TransformerEncoder leaves out hidden tokens in evaluation: its numbers are eager's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import onward

WIDTH, BATCH, TOKENS = 8, 3, 5
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


@pytest.mark.sample(16)
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
    shape = (BATCH, TOKENS, WIDTH)
    given = [{"x": torch.randn(shape), "y": torch.randn(shape), "hidden": hidden} for _ in range(2)]
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
