"""Transformers that are not of the library transformers: torch.nn's own, x-transformers, timm."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from batches import MADE_UP, Batch, Form
from classes import Entry
from no_torchvision import import_timm
from torch import nn

TASK = "MODULE"
Make = Callable[[], nn.Module]


def _encoder(**more: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 48, 0.0, batch_first=True, **more)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(32, 4, 48, 0.0, batch_first=True), 2)


def _x(kind: str, **more: Any) -> nn.Module:
    package: Any = importlib.import_module("x_transformers")
    layers = getattr(package, kind)(dim=32, depth=2, heads=4, attn_dim_head=8, **more)
    return package.TransformerWrapper(num_tokens=61, max_seq_len=64, attn_layers=layers)


def _timm(name: str, **more: Any) -> nn.Module:
    if not import_timm():
        raise ImportError("requires the timm library")
    package: Any = importlib.import_module("timm")
    return package.create_model(name, img_size=32, num_classes=3, drop_path_rate=0.0, **more)


SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 4, "patch_size": 8}
MODULES: dict[str, dict[str, Make]] = {
    "torch.nn": {
        "TransformerEncoder": _encoder,
        "TransformerEncoder, norm first": lambda: _encoder(norm_first=True, activation="gelu"),
        "TransformerDecoder": _decoder,
        "Transformer": lambda: nn.Transformer(32, 4, 2, 2, 48, 0.0, batch_first=True),
        "MultiheadAttention": lambda: nn.MultiheadAttention(32, 4, batch_first=True),
        "MultiheadAttention, sequence first": lambda: nn.MultiheadAttention(32, 4),
    },
    "x_transformers": {
        "Encoder": lambda: _x("Encoder"),
        "Decoder": lambda: _x("Decoder"),
        "Decoder, rotary, RMSNorm, SwiGLU": lambda: _x(
            "Decoder", rotary_pos_emb=True, use_rmsnorm=True, ff_glu=True, ff_swish=True
        ),
        "Decoder, ALiBi, one key head": lambda: _x("Decoder", alibi_pos_bias=True, attn_kv_heads=1),
    },
    "timm": {
        "VisionTransformer": lambda: _timm("vit_tiny_patch16_224", **SMALL),
        "DeiT": lambda: _timm("deit_tiny_patch16_224", **SMALL),
        "BEiT": lambda: _timm("beit_base_patch16_224", **SMALL),
        "EVA-02": lambda: _timm("eva02_tiny_patch14_224", **SMALL),
        "CaiT": lambda: _timm("cait_xxs24_224", **SMALL),
        "XCiT": lambda: _timm("xcit_nano_12_p8_224", embed_dim=32, depth=2, num_heads=4),
        "Swin": lambda: _timm("swin_tiny_patch4_window7_224", window_size=4),
    },
}  # fmt: skip


@dataclass
class ModuleMaker:
    """A batch for one of these, as `batches.Maker` makes them."""

    family: str
    name: str
    form: Form = Form(MADE_UP)  # noqa: RUF009

    def __call__(self, size: int, length: int) -> tuple[Batch, dict[str, Any]]:
        random = torch.Generator().manual_seed(1000 * size + length)

        def floats(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=random)

        padded = torch.arange(length) >= length - torch.arange(size).view(-1, 1) % 3
        if self.family == "timm":
            return {"x": floats(size, 3, 32, 32)}, {}
        if self.family == "x_transformers":
            ids = torch.randint(0, 61, (size, length), generator=random)
            return {"x": ids, "mask": ~padded}, {}
        x, other = floats(size, length, 32), floats(size, length + 3, 32)
        if self.name == "TransformerDecoder":
            return {"tgt": x, "memory": other, "tgt_key_padding_mask": padded}, {}
        if self.name == "Transformer":
            return {"src": other, "tgt": x, "tgt_key_padding_mask": padded}, {}
        if self.name.startswith("MultiheadAttention"):
            other = other.transpose(0, 1) if "first" in self.name else other
            x = x.transpose(0, 1) if "first" in self.name else x
            return {"query": x.contiguous(), "key": other.contiguous(),
                    "value": other.contiguous() + 1}, {}  # fmt: skip
        return {"src": x, "src_key_padding_mask": padded}, {}


def module_entries() -> list[Entry]:
    return [
        Entry(family, f"{family}: {name}", TASK, False)
        for family, made in MODULES.items()
        for name in made
    ]


def module_fitting(entry: Entry) -> tuple[nn.Module, ModuleMaker]:
    torch.manual_seed(0)
    name = entry.name.removeprefix(entry.family + ": ")
    return MODULES[entry.family][name](), ModuleMaker(entry.family, name)
