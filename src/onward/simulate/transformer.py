"""Transformer: the sizes of a dense GPT, BERT or Llama, its parameters and its FLOPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from onward.errors import OnwardError


@dataclass(frozen=True)
class Transformer:
    """A dense transformer with a head over its vocabulary.

    kv_heads: heads of keys and values, 0 for `heads`. ffn: width of the MLP, 0 for 4 * hidden.
    positions: learned positions, which Llama has none of. tied: whether the head's weight is the
    embedding's. tokens: the sequence length where none is given.
    """

    hidden: int
    layers: int
    heads: int
    vocab: int
    kv_heads: int = 0
    ffn: int = 0
    family: Literal["gpt", "bert", "llama"] = "gpt"
    positions: int = 0
    tied: bool = True
    tokens: int = 2048

    def __post_init__(self) -> None:
        sizes = (self.hidden, self.layers, self.heads, self.vocab, self.tokens)
        if min(sizes) < 1 or min(self.kv_heads, self.ffn, self.positions) < 0:
            raise OnwardError(f"a transformer of {self}; fix: sizes above 0")
        if self.hidden % self.heads or self.heads % (self.kv_heads or self.heads):
            raise OnwardError(
                f"{self.hidden} features in {self.heads} heads, {self.kv_heads} of keys; "
                "fix: heads that divide them"
            )

    @property
    def gated(self) -> bool:
        """Whether the MLP has a gate, and so three products."""
        return self.family == "llama"

    @property
    def width(self) -> int:
        """Features between the two products of the MLP."""
        return self.ffn or 4 * self.hidden

    @property
    def kv_width(self) -> int:
        """Features of the keys, which are those of the values too."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    @property
    def layer_weights(self) -> int:
        """Elements of the matrices of one layer."""
        attention = self.hidden * (2 * self.hidden + 2 * self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.width

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer."""
        if self.family == "llama":
            return self.layer_weights + 2 * self.hidden
        biases = self.hidden + 2 * self.kv_width + self.hidden + self.width + self.hidden
        return self.layer_weights + biases + 4 * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters before the first layer: tables of tokens and positions; BERT's types, norm."""
        extra = 4 * self.hidden if self.family == "bert" else 0
        return (self.vocab + self.positions) * self.hidden + extra

    @property
    def head_parameters(self) -> int:
        """Parameters after the last layer, without a weight that is tied."""
        h = self.hidden
        own = 0 if self.tied else self.vocab * h
        last = {"gpt": 2 * h, "llama": h, "bert": h * h + 3 * h + self.vocab}
        return own + last[self.family]

    @property
    def parameters(self) -> int:
        """Parameters of the model, each counted once."""
        return (
            self.embedding_parameters + self.layers * self.layer_parameters + self.head_parameters
        )

    def forward_flops(self, batch: int, tokens: int) -> tuple[float, float]:
        """FLOPs of one forward: of all layers, and of the head. Attention counts every pair of
        tokens, masked or not, as is the custom of MFU."""
        every = float(batch * tokens)
        layer = 2 * every * self.layer_weights + 4 * every * tokens * self.hidden
        return self.layers * layer, 2 * every * self.hidden * self.vocab

    def step_flops(self, batch: int, tokens: int, recompute: bool = False) -> float:
        """FLOPs of forward and backward of a step; with those of a second forward of the layers."""
        layers, head = self.forward_flops(batch, tokens)
        return (4 if recompute else 3) * layers + 3 * head


PRESETS: Mapping[str, Transformer] = {
    "bert-large": Transformer(1024, 24, 16, 30522, family="bert", positions=512, tokens=512),
    "gpt2": Transformer(768, 12, 12, 50257, positions=1024, tokens=1024),
    "gpt2-xl": Transformer(1600, 48, 25, 50257, positions=1024, tokens=1024),
    # Turing-NLG (Microsoft, 2020): 78 layers of 4256 features
    "turing-17b": Transformer(4256, 78, 28, 50257, positions=1024, tokens=1024),
    "gpt3-175b": Transformer(12288, 96, 96, 50257, positions=2048),
    "llama3-8b": Transformer(
        4096, 32, 32, 128256, 8, 14336, family="llama", tied=False, tokens=8192
    ),
    "llama3-70b": Transformer(
        8192, 80, 64, 128256, 8, 28672, family="llama", tied=False, tokens=8192
    ),
    "llama3-405b": Transformer(
        16384, 126, 128, 128256, 8, 53248, family="llama", tied=False, tokens=8192
    ),
}


__all__ = ["PRESETS", "Transformer"]
