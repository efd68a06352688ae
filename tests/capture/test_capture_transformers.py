"""torch's own transformer modules in training mode: eager's numbers, every dropout a site."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import tiny
import torch
from torch import nn

from onward.capture import CaptureRequest, capture
from onward.errors import CaptureError
from onward.train.verify import allowed_difference

WIDTH = 16
LONG, SHORT, BATCH = 7, 5, 3
causal = nn.Transformer.generate_square_subsequent_mask


# eager says so wherever a padding mask of bools meets an additive mask
pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched")


def distance_to_ramp(y: torch.Tensor) -> torch.Tensor:
    """A loss whose terms do not cancel and that a LayerNorm does not fix."""
    return (y - torch.arange(WIDTH).to(y.dtype) / 8).square().mean()


def future(rows: int, columns: int) -> torch.Tensor:
    """True where a row may not look."""
    return torch.ones(rows, columns, dtype=torch.bool).triu(1)


class Whole(nn.Module):
    """Encoder and decoder."""

    def __init__(self, dropout: float, mask: str, batch_first: bool, norm_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.length_dim = mask, int(batch_first)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # nested tensors, which only evaluation has
            self.model = nn.Transformer(
                WIDTH, 2, 1, 2, 2 * WIDTH, dropout, batch_first=batch_first, norm_first=norm_first
            )

    def forward(
        self,
        source: torch.Tensor,
        target: torch.Tensor,
        source_padding: torch.Tensor | None = None,
        target_padding: torch.Tensor | None = None,
    ) -> torch.Tensor:
        length = target.shape[self.length_dim]
        masks: dict[str, Any] = {
            "none": {},
            "float": {"tgt_mask": causal(length)},
            "bool": {"tgt_mask": future(length, length)},
            "hint": {"tgt_mask": causal(length), "tgt_is_causal": True},
        }[self.mask]
        y = self.model(
            source, target, src_key_padding_mask=source_padding,
            tgt_key_padding_mask=target_padding, memory_key_padding_mask=source_padding, **masks,
        )  # fmt: skip
        return distance_to_ramp(y)


class Encoder(nn.Module):
    def __init__(self, dropout: float, mask: str, batch_first: bool, norm_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hint = {"none": None, "float": None, "hint": True, "no": False}[mask]
        layer = nn.TransformerEncoderLayer(
            WIDTH, 2, 2 * WIDTH, dropout, "gelu", batch_first=batch_first, norm_first=norm_first
        )
        self.model = nn.TransformerEncoder(
            layer, 2, enable_nested_tensor=batch_first and not norm_first
        )
        self.register_buffer("mask", None if mask == "none" else causal(LONG))

    def forward(self, x: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        mask = self.mask if self.mask is None else self.get_buffer("mask")
        y = self.model(x, mask, src_key_padding_mask=padding, is_causal=self.hint)
        return distance_to_ramp(y)


class Attentions(nn.Module):
    """nn.MultiheadAttention with weights asked for or not, under each kind of mask."""

    CALLS = tuple(
        (weights, mask)
        for weights in ("none", "mean", "each")
        for mask in ("none", "bool", "float", "hint")
    )

    def __init__(self, dropout: float, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.models = nn.ModuleList(
            [nn.MultiheadAttention(WIDTH, 2, dropout, batch_first=True, **options)
             for _ in self.CALLS]
        )  # fmt: skip

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None = None, padding: torch.Tensor | None = None
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=q.dtype)
        k = q if k is None else k
        for model, (weights, mask) in zip(self.models, self.CALLS, strict=True):
            allowed = None if mask == "none" else future(q.shape[1], k.shape[1])
            if allowed is not None and mask == "float":
                allowed = torch.zeros(allowed.shape, dtype=q.dtype).masked_fill(allowed, -torch.inf)
            y, p = model(
                q, k, k, key_padding_mask=padding, attn_mask=allowed,
                need_weights=weights != "none", average_attn_weights=weights == "mean",
                is_causal=mask == "hint" and q is k,
            )  # fmt: skip
            total = total + distance_to_ramp(y)
            total = total if p is None else total + p.square().mean()
        return total


def tokens(length: int, batch_first: bool = True) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    shape = (BATCH, length, WIDTH) if batch_first else (length, BATCH, WIDTH)
    return torch.randn(*shape, generator=generator)


def padding(length: int) -> torch.Tensor:
    """True at the padding: the last places of the second sample."""
    mask = torch.zeros(BATCH, length, dtype=torch.bool)
    mask[1, length - 2 :] = True
    return mask


def case_of(kind: str, mask: str, batch_first: bool, norm_first: bool, padded: bool) -> Any:
    data = {"x": tokens(LONG, batch_first)} | ({"padding": padding(LONG)} if padded else {})
    if kind == "encoder":
        return lambda dropout: Encoder(dropout, mask, batch_first, norm_first), data
    data = {"source": tokens(LONG, batch_first), "target": tokens(SHORT, batch_first)}
    if padded:
        data |= {"source_padding": padding(LONG), "target_padding": padding(SHORT)}
    return lambda dropout: Whole(dropout, mask, batch_first, norm_first), data


def attentions_of(cross: bool, padded: bool, **options: Any) -> Any:
    data = {"q": tokens(LONG)} | ({"k": tokens(SHORT)} if cross else {})
    if padded:
        data["padding"] = padding(SHORT if cross else LONG)
    return lambda dropout: Attentions(dropout, **options), data


CASES = {
    "whole, length first": case_of("whole", "none", False, True, False),
    "whole, length first, float mask, padding": case_of("whole", "float", False, False, True),
    "whole, batch first, bool mask, padding": case_of("whole", "bool", True, True, True),
    "whole, batch first, causal hint": case_of("whole", "hint", True, False, False),
    "encoder, length first, mask": case_of("encoder", "float", False, False, False),
    "encoder, length first, causal hint, padding": case_of("encoder", "hint", False, True, True),
    "encoder, batch first, hint that it is not": case_of("encoder", "no", True, True, False),
    "encoder, batch first, padding": case_of("encoder", "none", True, False, True),
    "attention": attentions_of(cross=False, padded=False),
    "attention, padding": attentions_of(cross=False, padded=True),
    "cross attention, padding": attentions_of(cross=True, padded=True),
    "attention, more keys": attentions_of(True, True, add_bias_kv=True, add_zero_attn=True),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_eagers(name: str) -> None:
    """Loss and every gradient: at most twice eager's distance to fp64."""
    make, data = CASES[name]
    model = make(0.0).train()
    exact, plain = (tiny.eager(model, data, t) for t in (torch.float64, torch.float32))
    have = tiny.gradients(model, data)
    assert set(have) == set(exact)
    broken = []
    for tensor, truth in exact.items():
        distance = float((have[tensor].double() - truth).norm())
        allowed = allowed_difference(plain[tensor], truth)
        if distance > allowed:
            broken.append(f"{tensor}: {distance:.3e}, allowed {allowed:.3e}")
    assert not broken, "\n".join(broken)


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", CASES)
def test_every_dropout_is_a_site_and_has_a_gradient(name: str) -> None:
    make, data = CASES[name]
    model = make(0.25).train()
    detect = torch.nn.modules.transformer._detect_is_causal_mask
    made = tiny.compiled(model, data)
    assert torch.nn.modules.transformer._detect_is_causal_mask is detect
    sites = sum(isinstance(m, (nn.Dropout, nn.MultiheadAttention)) for m in model.modules())
    assert len(tiny.dropout_nodes(made.captured.graph)) == sites
    graph = made.differentiated(tiny.trained(made))
    names = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
    assert len(names) == 1 + len(tiny.trained(made))
    for tensor, value in tiny.execute(made, graph, data, names).items():
        assert value.isfinite().all(), tensor


# ---- what writes in place


class InPlace(nn.Module):
    """`view`: how the memory written is shared with another tensor."""

    def __init__(self, view: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = nn.Parameter(torch.randn(4, 6))
        self.view = view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.w
        match self.view:
            case "written":
                y[:, :3].relu_()
            case "read":
                left = y[:, :3]
                y.mul_(2.0)
                return left.sum()
            case "input":
                x.add_(1.0)
            case "window, read before":
                left = y[:, :3]
                y[:, 1:] = 0.0
                return left.sum()
            case "windows":
                z = torch.zeros_like(y)
                z[:, 1:] = y[:, :-1]
                z[1:-1][:, 0] = y[2:, -1]
                z[..., -1] = 0.5
                y = z.mul_(2.0).sin() * y
            case _:
                z = y * 2
                z.masked_fill_(y > 1, 0.5).add_(y, alpha=0.5).mul_(3.0)
                y = y.tanh() + nn.functional.relu(z, inplace=True) + z
        return y.square().mean()


@pytest.mark.parametrize("view", ["", "windows", "written", "read", "window, read before"])
def test_ops_that_write_in_place_mean_what_they_mean(view: str) -> None:
    model, data = InPlace(view), {"x": torch.randn(5, 4)}
    want, have = tiny.eager(model, data, torch.float32), tiny.gradients(model, data)
    for name, y in want.items():
        torch.testing.assert_close(have[name], y, rtol=1e-5, atol=1e-6)


def test_writing_into_the_batch_is_refused() -> None:
    with pytest.raises(CaptureError, match="writes in place into the batch's x"):
        capture(CaptureRequest(InPlace("input"), (), {"x": torch.randn(5, 4)}))
