"""Calls of the native attention kernels on every build, with rubbish around what they may write."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from onward.graph.types import DType, Type
from onward.kernels import NATIVE, KernelArguments, KernelSpec
from onward.kernels.native import attention
from onward.kernels.native.library import Library, files, usable

CANARY = 12345.0
SEED = torch.tensor([2**32 - 1, 987654321])


@pytest.fixture(params=usable(), autouse=True)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Library:
    """The library of one build; every test runs on each build that this processor can run."""
    loaded = Library(files()[request.param])
    monkeypatch.setattr(attention, "library", lambda: loaded)
    return loaded


# Masks that say which keys a query sees, both numbered alike; most leave out whole blocks of keys.
PATTERNS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "window": lambda q, k: (q - k).abs() <= 20,
    "behind": lambda q, k: (k <= q) & (k > q - 33),
    "below": lambda q, k: k <= q,
    "above": lambda q, k: k > q,
    "documents": lambda q, k: q // 50 == k // 50,
    "last": lambda q, k: k >= k[-1] - 40 * q.clamp(max=1),
    "middle": lambda q, k: (q >= 0) & (k > 90) & (k < 101),
    "ends": lambda q, k: (k == 0) | (k == k[-1]) | (q < 3),
    "few": lambda q, k: (q % 70 > 64) & (k >= 0),
}


@dataclass(frozen=True)
class Call:
    """Sizes, mask and dropout of one attention call."""

    B: int = 2
    H: int = 2
    Q: int = 5
    S: int = 5
    K: int = 8
    E: int = 8
    causal: bool = False
    mask: str = ""  # kind and shape: "bool 2,1,1,5"; a pattern has "least " or "infinite " before
    ratio: float = 0.0
    sample_dim: int = 0
    softcap: float = 0.0
    fill: float | None = None
    fill_is_added: bool = False
    biases: int = 0  # samples that a bias f[biases,H,Q,S] is given for
    low_bias: bool = False  # the bias is the lowest number at many keys, in some rows at all

    def __str__(self) -> str:
        kind = f" {self.mask}" if self.mask else ""
        drop = f" drop{self.ratio}@{self.sample_dim}" if self.ratio else ""
        drop += f" cap{self.softcap}" if self.softcap else ""
        drop += "" if self.fill is None else f" fill{self.fill:g}"
        drop += " added" * self.fill_is_added
        drop += f" {'low ' * self.low_bias}bias{self.biases}" if self.biases else ""
        sizes = (self.B, self.H, self.Q, self.S, self.K, self.E)
        return ",".join(map(str, sizes)) + " causal" * self.causal + kind + drop

    @property
    def attrs(self) -> dict[str, Any]:
        attrs = {"scale": 1 / math.sqrt(self.K), "is_causal": int(self.causal)}
        attrs |= {"softcap": self.softcap} if self.softcap else {}
        attrs |= {} if self.fill is None else {"fill": self.fill}
        attrs |= {"fill_is_added": 1} if self.fill_is_added else {}
        attrs |= {"bias_gradient": 1} if self.biases else {}
        drop = {"ratio": self.ratio, "site": 2**20 + 3, "sample_dim": self.sample_dim}
        return attrs | drop if self.ratio else attrs

    def bias(self) -> torch.Tensor | None:
        g = torch.Generator().manual_seed(5)
        shape = (self.biases, self.H, self.Q, self.S)
        drawn = torch.randn(shape, generator=g) * 2
        if self.low_bias:
            drawn[torch.rand(shape, generator=g) > 0.5] = torch.finfo(torch.float32).min
            drawn[..., ::3, :] = torch.finfo(torch.float32).min
        return drawn if self.biases else None

    def tensors(self) -> tuple[list[torch.Tensor], torch.Tensor | None]:
        """dy, q, k, v; mask."""
        g = torch.Generator().manual_seed(sum(map(ord, str(self))))
        B, H, Q, S, K, E = self.B, self.H, self.Q, self.S, self.K, self.E
        shapes = [(B, H, Q, E), (B, H, Q, K), (B, H, S, K), (B, H, S, E)]
        tensors = [torch.randn(*shape, generator=g) for shape in shapes]
        added, _, rest = self.mask.rpartition("added ")
        kind, _, sizes = rest.partition(" ")
        if not kind:
            return tensors, None
        shape = [int(n) for n in sizes.split(",")]
        drawn = torch.randn(shape, generator=g)
        if kind in PATTERNS:
            query = torch.arange(shape[-2]).unsqueeze(1) * S // Q
            mask = PATTERNS[kind](query, torch.arange(shape[-1])).expand(shape).clone()
            low = {"least ": torch.finfo(torch.float32).min, "infinite ": -torch.inf}
            return tensors, torch.where(mask, 0.0, low[added]) if added else mask
        if kind == "bool":
            mask = drawn > -0.8
            mask[..., 0] = True
            return tensors, mask
        if kind == "nothing":  # rows with nothing to attend to
            mask = drawn > 0.0
            mask.reshape(-1, shape[-1])[::2] = False
            return tensors, mask
        if kind == "infinite":
            mask = torch.where(drawn > 0.8, -torch.inf, 0.0)
            mask[..., 0] = 0.0
            return tensors, mask
        return tensors, drawn


def wide(x: torch.Tensor, parts: int = 3) -> torch.Tensor:
    """`x[B,H,T,K]` in columns of a buffer `[B,T,parts*H*K]`, as a product of q, k, v leaves it."""
    B, H, T, K = x.shape
    room = torch.full((B, T, parts * H * K), CANARY)
    y = room[..., H * K : 2 * H * K].view(B, T, H, K).transpose(1, 2)
    y.copy_(x)
    return y


def type_of(x: torch.Tensor | None) -> Type | None:
    if x is None:
        return None
    kinds = {torch.bool: DType.BOOL, torch.int64: DType.INT64, torch.float32: DType.FLOAT}
    return Type(kinds[x.dtype], tuple(x.shape))


def run(
    op: str, attrs: dict[str, Any], inputs: list[torch.Tensor | None], outputs: list[torch.Tensor]
) -> None:
    """One launch; outputs are rubbish before, and nothing is written outside the scratch."""
    (kernel,) = NATIVE[op]
    types = tuple(type_of(x) for x in inputs)
    need = KernelSpec(op, attrs, types, tuple(t for y in outputs if (t := type_of(y)) is not None))
    assert kernel.unsupported(need) is None
    rooms, scratch = [], []
    for t in kernel.scratch(need):
        shape = [int(n) for n in t.shape]  # type: ignore[arg-type]
        whole = t.dtype == DType.INT32
        rubbish = torch.tensor(-77777, dtype=torch.int32) if whole else torch.tensor(CANARY)
        room = rubbish.repeat(math.prod(shape) + 128)
        if not whole:
            room[64:-64] = torch.nan
        rooms.append((room, rubbish))
        scratch.append(room[64:-64].view(shape))
    for y in outputs:
        y.fill_(torch.nan)
    kernel.bind(KernelArguments(attrs, inputs, outputs, scratch))()
    for room, rubbish in rooms:
        assert (room[:64] == rubbish).all() and (room[-64:] == rubbish).all(), "out of the scratch"
