"""Calls of ops at sizes of real models, for which the Triton kernels are compiled.

A call has no data: its tensors are torch's meta tensors, and the host code of a kernel launches
what it would launch on a device. `f[...]` stands for the dtype of the call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from onward.graph.build import Builder
from onward.graph.graph import Graph, Role, Value, attributes, type_of
from onward.graph.types import DType, parse_type
from onward.kernels import TRITON, Kernel, KernelArguments, KernelSpec, torch_dtype

DTYPES = {"fp32": DType.FLOAT, "fp16": DType.FLOAT16, "bf16": DType.BFLOAT16}
_WRITTEN = {"fp32": "f32", "fp16": "f16", "bf16": "bf16"}


@dataclass(frozen=True)
class RealCall:
    """One call of an op. types: of the inputs, None for an absent one. typed: names of the
    attributes that hold the call's dtype. laid: how inputs lie that are not contiguous, by their
    place among the inputs: a key of `_LAID`. only: the dtypes that are compiled, of those that the
    kernel takes. tf32: whether products of fp32 are in TF32."""

    op: str
    label: str
    types: tuple[str | None, ...]
    attrs: dict[str, Any] = field(default_factory=dict)
    typed: tuple[str, ...] = ()
    laid: dict[int, str] = field(default_factory=dict)
    only: tuple[str, ...] = ("fp32", "fp16", "bf16")
    tf32: bool = False

    def __str__(self) -> str:
        return f"{self.op} {self.label}"

    @property
    def kernel(self) -> Kernel:
        (kernel,) = TRITON[self.op]
        return kernel

    @property
    def dtypes(self) -> list[str]:
        """The dtypes that are compiled."""
        return [d for d in self.only if self.kernel.unsupported(self.spec(d)) is None]

    def spec(self, dtype: str) -> KernelSpec:
        graph = Graph(self.op)
        values: list[Value | None] = []
        for i, text in enumerate(self.types):
            if text is None:
                values.append(None)
                continue
            type = parse_type(_WRITTEN[dtype] + text[1:] if text.startswith("f[") else text)
            values.append(graph.input(f"x{i}", type, Role.BATCH))
        attrs = {**self.attrs, **{name: int(DTYPES[dtype]) for name in self.typed}}
        made = Builder(graph, module="model.layer").node(self.op, values, attrs)
        graph.outputs = {
            f"y{i}": y for i, y in enumerate(made if isinstance(made, tuple) else (made,))
        }
        node = next(iter(graph))
        return KernelSpec(
            node.op_type, attributes(node),
            tuple(None if v is None else type_of(v) for v in node.inputs),
            tuple(type_of(v) for v in node.outputs),
        )  # fmt: skip

    def launch(self, dtype: str) -> None:
        """Launches the call on meta tensors; what the host reads lies in host
        memory: 0.5, or 1 of integers."""
        spec, kernel = self.spec(dtype), self.kernel
        refused = kernel.unsupported(spec)
        assert refused is None, f"{self} {dtype}: {refused}"
        inputs = [
            None if t is None
            else _on_host(t) if i in kernel.host
            else _meta(t, self.laid.get(i))
            for i, t in enumerate(spec.inputs)
        ]  # fmt: skip
        outputs = [_elsewhere(t) for t in spec.outputs]
        scratch = [_meta(t) for t in kernel.scratch(spec)]
        flag = torch.zeros(2, dtype=torch.int64, device="meta")
        with torch.no_grad(), _tf32() if self.tf32 else nullcontext():
            kernel.bind(KernelArguments(spec.attrs, inputs, outputs, scratch, flag))()


@contextmanager
def _tf32() -> Iterator[None]:
    """Within it, PyTorch's products of fp32 are in TF32."""
    products: Any = torch.backends.cuda.matmul
    before, products.fp32_precision = products.fp32_precision, "tf32"
    try:
        yield
    finally:
        products.fp32_precision = before


def _sizes(type: Any) -> list[int]:
    return [int(n) for n in type.shape]


def _on_host(type: Any) -> torch.Tensor:
    dtype = torch_dtype(type.dtype)
    return torch.full(_sizes(type), 0.5 if dtype.is_floating_point else 1, dtype=dtype)


def _meta(type: Any, laid: str | None = None) -> torch.Tensor:
    sizes, dtype = _sizes(type), torch_dtype(type.dtype)
    if laid is not None:
        return _LAID[laid](sizes, dtype)
    return torch.empty(sizes, dtype=dtype, device="meta")


def _elsewhere(type: Any) -> torch.Tensor:
    """A tensor at another address than all others, which are at 0: hosts ask whether an output
    overwrites an input."""
    sizes = _sizes(type)
    room = torch.empty(_AWAY + math.prod(sizes), dtype=torch_dtype(type.dtype), device="meta")
    return room[_AWAY:].view(sizes)


def _one(sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty([1] * len(sizes), dtype=dtype, device="meta").expand(sizes)


def _half(sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
    *outer, width = sizes
    return torch.empty([*outer, 2 * width], dtype=dtype, device="meta")[..., width:]


def _heads(sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
    B, H, T, K = sizes
    room = torch.empty([B, T, 3 * H * K], dtype=dtype, device="meta")
    return room[..., H * K : 2 * H * K].view(B, T, H, K).transpose(1, 2)


_AWAY = 256  # elements: a multiple of the alignment that Triton looks for
# One number expanded; the second half of rows of twice the width; heads as a product of q, k and v
# leaves them.
_LAID: dict[str, Callable[[list[int], torch.dtype], torch.Tensor]] = {
    "one": _one, "half": _half, "heads": _heads,
}  # fmt: skip


# ---- the calls

_SEED = ("i64[2]", "i64[]")
_DROP = {"ratio": 0.1, "site": 3, "sample_dim": 0}
_EACH, _BF16 = ("fp32", "fp16", "bf16"), ("bf16",)


def _norms() -> Iterator[RealCall]:
    for width in (768, 4096):
        full, row, stat = f"f32[8,1024,{width}]", f"f32[{width}]", "f32[8,1024,1]"
        label, axis = f"8x1024x{width}", {"axis": -1}
        yield RealCall("LayerNormalization", label, (full, row, row), axis)
        yield RealCall("LayerNormalizationGrad", label, (full, full, row, stat, stat), axis)
    for width, label, drop, seed, only in (
        (1024, "8x1024x1024 dropout", _DROP, _SEED, _EACH),
        (4096, "8x1024x4096", {}, (), _EACH), (5120, "8x1024x5120 dropout", _DROP, _SEED, _BF16),
    ):  # fmt: skip
        full, row, stat = f"f32[8,1024,{width}]", f"f32[{width}]", "f32[8,1024,1]"
        x = f"f[8,1024,{width}]"
        yield RealCall(
            "AddLayerNormalization", label, (x, full, row, row, *seed), drop, ("y_type",),
            only=only,
        )  # fmt: skip
        yield RealCall(
            "AddLayerNormalizationGrad", label, (x, full, full, row, stat, stat, *seed), drop,
            ("x_type",), only=only,
        )  # fmt: skip


def _rms_norms() -> Iterator[RealCall]:
    epsilon = {"epsilon": 1e-6}
    full, row = "f[8,1024,4096]", "f[4096]"
    yield RealCall("RMSNorm", "8x1024x4096", (full, row), epsilon)
    yield RealCall("RMSNormGrad", "8x1024x4096", (full, full, row), epsilon)
    for width, label, drop, seed, only in (
        (768, "8x1024x768 dropout", _DROP, _SEED, _EACH), (4096, "8x1024x4096", {}, (), _EACH),
        (8192, "8x1024x8192", {}, (), _BF16),
    ):  # fmt: skip
        x, full, row = f"f[8,1024,{width}]", f"f32[8,1024,{width}]", f"f32[{width}]"
        attrs = {**epsilon, **drop}
        yield RealCall("AddRMSNorm", label, (x, full, row, *seed), attrs, ("y_type",), only=only)
        yield RealCall(
            "AddRMSNormGrad", label, (x, full, full, row, *seed), attrs, ("x_type",), only=only
        )


def _group_norms() -> Iterator[RealCall]:
    attrs = {"groups": 32, "epsilon": 1e-5}
    whole, large = "f[8,1280,8,8]", "f[8,320,64,64]"
    stat = ("f32[8,32]",) * 2
    yield RealCall("GroupNorm", "8x1280x8x8", (whole, "f[1280]", "f[1280]"), attrs)
    yield RealCall("GroupNorm", "8x320x64x64", (large, "f[320]", "f[320]"), attrs)
    yield RealCall("GroupNormGrad", "8x320x64x64", (large, large, "f[320]", *stat), attrs)


def _activations() -> Iterator[RealCall]:
    for name, sizes in (("gelu_tanh", (8, 1024, 4096)), ("gelu", (64, 128, 3072))):
        x, bias, attrs = f"f{_written(sizes)}", f"f[{sizes[-1]}]", {"activation": name}
        label = f"{'x'.join(map(str, sizes))} {name}"
        yield RealCall("BiasActivation", label, (x, bias), attrs)
        yield RealCall("BiasActivationGrad", label, (x, x, bias), attrs)
    x, silu = "f[8,1024,11008]", {"activation": "silu"}
    yield RealCall(
        "GatedActivation", "8x1024x11008 silu", (x, x), silu, laid={0: "half", 1: "half"}
    )
    yield RealCall(
        "GatedActivationGrad", "8x1024x11008 silu", (x, x, x), silu, laid={1: "half", 2: "half"}
    )


def _rotary() -> Iterator[RealCall]:
    angles = ("f[1,1,1024,128]",) * 2
    yield RealCall("Rotary", "8x32x1024x128", ("f[8,32,1024,128]", *angles), laid={0: "heads"})
    angles = ("f[1,1,1024,64]",) * 2
    yield RealCall(
        "Rotary", "8x16x1024x256 interleaved 64", ("f[8,16,1024,256]", *angles),
        {"interleaved": 1}, laid={0: "heads"},
    )  # fmt: skip


def _rows() -> Iterator[RealCall]:
    ids = "i64[8,1024]"
    yield RealCall("Embedding", "50257x1024 at 8x1024", ("f[50257,1024]", ids), {"padding_idx": 0})
    yield RealCall("Gather", "64x128x768 at 20", ("f[64,128,768]", "i64[20]"), {"axis": 1})
    yield RealCall("GatherND", "64x128x768 at 1280x2", ("f[64,128,768]", "i64[1280,2]"))
    yield RealCall(
        "ScatterND", "64x128x768 at 1280x2", ("f[64,128,768]", "i64[1280,2]", "f[1280,768]"),
        {"reduction": "none"},
    )  # fmt: skip
    for rows, label in ((8192, "counted"), (16384, "sorted")):
        yield RealCall(
            "ScatterND", f"50257x1024 add {rows} {label}",
            ("f[50257,1024]", f"i64[{rows},1]", f"f[{rows},1024]"), {"reduction": "add"},
            laid={0: "one"} if label == "counted" else {},
        )  # fmt: skip


def _attention() -> Iterator[RealCall]:
    plain, drop = {"scale": 0.125, "is_causal": 0}, {"scale": 0.125, "is_causal": 0, **_DROP}
    for label, attrs, sizes, rest in (
        ("8x16x1024x64 causal dropout", {**drop, "is_causal": 1}, (8, 16, 1024, 64),
         (None, *_SEED)),
        ("8x32x1024x128 causal", {**plain, "is_causal": 1}, (8, 32, 1024, 128), ()),
        ("64x16x128x64 mask dropout", drop, (64, 16, 128, 64), ("b[64,1,1,128]", *_SEED)),
        ("8x8x512x64 bias", {**plain, "bias_gradient": 1}, (8, 8, 512, 64),
         (*[None] * 5, "f[1,8,512,512]")),
        ("8x8x512x64 f32 bias", {**plain, "bias_gradient": 1}, (8, 8, 512, 64),
         (*[None] * 5, "f32[1,8,512,512]")),
        ("8x8x512x64 f32 bias f32 mask", {**plain, "bias_gradient": 1}, (8, 8, 512, 64),
         ("f32[8,1,512,512]", *[None] * 4, "f32[1,8,512,512]")),
        ("8x8x512x128 f32 bias f32 mask", {**plain, "bias_gradient": 1}, (8, 8, 512, 128),
         ("f32[8,1,512,512]", *[None] * 4, "f32[1,8,512,512]")),
        ("1x16x8192x64 packed causal dropout", {**drop, "is_causal": 1}, (1, 16, 8192, 64),
         (None, *_SEED, "i64[8192,2]", "i64[8192,2]")),
    ):  # fmt: skip
        only = _EACH if "f32" not in label else _BF16 if "mask" in label else ("fp16", "bf16")
        yield from _attending(label, attrs, sizes, sizes[3], rest, only)
    for label, sizes, values, only, tf32 in (
        ("4x16x1024x256 causal", (4, 16, 1024, 256), 256, ("fp32", "bf16"), False),
        ("8x16x1024x192 values of 128 causal", (8, 16, 1024, 192), 128, _BF16, False),
        ("64x16x128x16 causal", (64, 16, 128, 16), 16, _BF16, False),
        ("8x16x1024x64 causal tf32", (8, 16, 1024, 64), 64, ("fp32",), True),
    ):
        yield from _attending(label, {**plain, "is_causal": 1}, sizes, values, (), only, tf32)


def _attending(
    label: str, attrs: dict[str, Any], sizes: tuple[int, ...], values: int,
    rest: tuple[str | None, ...], only: tuple[str, ...] = _EACH, tf32: bool = False,
) -> Iterator[RealCall]:  # fmt: skip
    """Attention and its gradient. sizes: of queries; values: numbers of a value; rest: the inputs
    from the mask on."""
    x, v, row = f"f{_written(sizes)}", f"f{_written((*sizes[:3], values))}", _written(sizes[:3])
    masks, last = [*rest, None, None, None][:3], rest[3:]
    forward = {k: v for k, v in attrs.items() if k != "bias_gradient"}
    yield RealCall("FlashAttention", label, (x, x, v, *masks, *last), forward, only=only, tf32=tf32)
    given = (v, x, x, v, *masks, v, f"f32{row}", f"f32{row}", *last)
    yield RealCall("FlashAttentionGrad", label, given, attrs, only=only, tf32=tf32)


def _written(sizes: tuple[int, ...]) -> str:
    return f"[{','.join(map(str, sizes))}]"


def _losses() -> Iterator[RealCall]:
    mean = {"ignore_index": -100, "reduction": "mean"}
    gpt2 = ("f[8192,1024]", "f[50257,1024]", None, "i64[8192]")
    yield RealCall("LinearCrossEntropy", "8192x1024x50257", gpt2, mean)
    for op in ("LinearCrossEntropyGrad", "LinearCrossEntropyStep"):
        yield RealCall(op, "8192x1024x50257", ("f32[]", *gpt2), mean)
    yield RealCall(
        "LinearCrossEntropyStep", "1280x768x30522 bias smoothing",
        ("f32[]", "f[1280,768]", "f[30522,768]", "f32[30522]", "i64[1280]"),
        {**mean, "label_smoothing": 0.1},
    )  # fmt: skip
    z, labels = "f[8192,50257]", "i64[8192]"
    yield RealCall("SoftmaxCrossEntropyLoss", "8192x50257", (z, labels), mean)
    yield RealCall("SoftmaxCrossEntropyLossGrad", "8192x50257", ("f[]", z, labels), mean)
    few, smooth = ("f[1024,1000]", "i64[1024]", "f[1000]"), {**mean, "label_smoothing": 0.1}
    yield RealCall("CrossEntropyLoss", "1024x1000 weights smoothing", few, smooth)
    yield RealCall(
        "SoftmaxCrossEntropyLossGrad", "1024x1000 weights smoothing", ("f[]", *few), smooth
    )


def _convolutions() -> Iterator[RealCall]:
    for label, taps, pads in (("causal", 4, [3, 0]), ("centred", 31, [15, 15])):
        x, w, attrs = "f[8,1536,1024]", f"f[1536,1,{taps}]", {"group": 1536, "pads": pads}
        label = f"8x1536x1024 {taps} taps {label}"
        yield RealCall("Conv", label, (x, w, "f[1536]"), attrs)
        yield RealCall("ConvTranspose", label, (x, w), attrs)
        yield RealCall("ConvWeightGrad", label, (x, x), {**attrs, "kernel_shape": [taps]})


def _others() -> Iterator[RealCall]:
    yield RealCall("AllFinite", "4096x1024", (None, "f[4096,1024]"))
    p, g, hyper = "f32[4096,1024]", "f[4096,1024]", (*["f64[]"] * 5, "i64[]")
    yield RealCall("AdamUpdate", "4096x1024", (p, g, p, p, None, *hyper), {"decoupled": 1})
    yield RealCall(
        "AdamUpdate", "4096x1024 most scale", (p, g, p, p, p, *hyper, "f32[]"), {"decoupled": 0}
    )
    low, codes, largest = "bf16[4096,1024]", "u8[4096,1024]", "f32[16384]"
    yield RealCall(
        "AdamUpdateBf16", "4096x1024", (p, g, low, low, *hyper, "i64[2]"),
        {"decoupled": 1, "site": 3},
    )  # fmt: skip
    yield RealCall(
        "AdamUpdate8Bit", "4096x1024 scale", (p, g, *(codes, largest) * 2, *hyper, "f32[]"),
        {"decoupled": 1},
    )  # fmt: skip
    for low, wide in ((3, 1), (1, 1), (4, 4)):
        terms = ("f[8192,1024]",) * low + ("f32[8192,1024]",) * wide
        yield RealCall("WideSum", f"8192x1024 {low} and {wide}", terms)
    yield RealCall("ReduceL2", "4096x1024", ("f[4096,1024]",), {"keepdims": 0})
    yield RealCall("Dropout", "8x1024x1024", ("f[8,1024,1024]", *_SEED), _DROP)
    yield RealCall("Dropout", "8192x1024 packed", ("f[8192,1024]", *_SEED, "i64[8192,2]"), _DROP)


CALLS: tuple[RealCall, ...] = (
    *_norms(), *_rms_norms(), *_group_norms(), *_attention(), *_losses(), *_activations(),
    *_rotary(), *_rows(), *_convolutions(), *_others(),
)  # fmt: skip
