"""Ops of ONNX Runtime's own domain are read as what onnxruntime computes for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper

from onward.graph.graph import Graph
from onward.graph.importer import from_onnx
from onward.graph.importer.decomposition import DECOMPOSITIONS
from onward.graph.importer.decompositions.microsoft import DOMAIN

Execute = Callable[[Graph, dict[str, np.ndarray]], dict[str, np.ndarray]]
RNG = np.random.default_rng(0)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def whole(high: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, high, shape).astype(np.int32)


@dataclass(frozen=True)
class Call:
    """A call of an op. given: its inputs; arrays in `fixed` are initializers. outputs: names, ""
    for one that is left out."""

    op: str
    given: list[np.ndarray | None]
    attrs: dict[str, Any] = field(default_factory=dict)
    fixed: tuple[int, ...] = ()
    outputs: tuple[str, ...] = ("y",)
    domain: str = DOMAIN

    def model(self) -> onnx.ModelProto:
        names = ["" if x is None else f"x{i}" for i, x in enumerate(self.given)]
        node = helper.make_node(self.op, names, self.outputs, domain=self.domain, **self.attrs)
        arrays = {n: x for n, x in zip(names, self.given, strict=True) if x is not None}
        kept = {f"x{i}" for i in self.fixed}
        graph = helper.make_graph(
            [node], "call",
            [helper.make_tensor_value_info(
                n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape
             ) for n, x in arrays.items() if n not in kept],
            [helper.make_empty_tensor_value_info(n) for n in self.outputs if n],
            [onnx.numpy_helper.from_array(x, n) for n, x in arrays.items() if n in kept],
        )  # fmt: skip
        return helper.make_model(
            graph, ir_version=10,
            opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(DOMAIN, 1)],
        )  # fmt: skip

    @property
    def feeds(self) -> dict[str, np.ndarray]:
        return {
            f"x{i}": x for i, x in enumerate(self.given) if x is not None and i not in self.fixed
        }


def packed(bits: int, zeros: bool, inner: int = 40, outer: int = 6, block: int = 16) -> Call:
    """A MatMulNBits whose last block is not full."""
    blocks, each = -(-inner // block), block * bits // 8
    given: list[np.ndarray | None] = [
        floats(3, 2, inner),
        RNG.integers(0, 256, (outer, blocks, each)).astype(np.uint8),
        np.abs(floats(outer, blocks)),
    ]
    if zeros:
        given.append(RNG.integers(0, 256, (outer, -(-blocks * bits // 8))).astype(np.uint8))
    attrs = {"K": inner, "N": outer, "bits": bits, "block_size": block}
    return Call("MatMulNBits", given, attrs, fixed=tuple(range(1, len(given))))


B, T, S, H, D = 2, 5, 7, 2, 8
RAW = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 1, 1]], np.int32)
LENGTHS = np.array([5, 3], np.int32)
WEIGHTS = [floats(D, 3 * D), floats(3 * D)]
TABLES = [floats(16, 4), floats(16, 4)]
PLACES = np.array([[0, 3, 1, 2, 9], [4, 4, 5, 6, 7]], np.int64)
FIRST = np.array([2], np.int64)

CALLS: dict[str, Call] = {
    "gelu": Call("Gelu", [floats(3, 4)]),
    "bias gelu": Call("BiasGelu", [floats(3, 4), floats(4)]),
    "fast gelu": Call("FastGelu", [floats(3, 4)]),
    "fast gelu of a bias": Call("FastGelu", [floats(3, 4), floats(4)]),
    "quick gelu": Call("QuickGelu", [floats(3, 4)], {"alpha": 1.5}),
    "matmul": Call("FusedMatMul", [floats(2, 3, 4), floats(2, 4, 5)], {"alpha": 0.5}),
    "matmul turned": Call(
        "FusedMatMul", [floats(2, 4, 3), floats(2, 5, 4)], {"transA": 1, "transB": 1}
    ),
    "matmul of a vector": Call("FusedMatMul", [floats(4), floats(4, 5)]),
    "two bits": packed(2, zeros=False),
    "four bits": packed(4, zeros=False),
    "four bits with zeros": packed(4, zeros=True),
    "eight bits with zeros": packed(8, zeros=True),
    "simplified": Call(
        "SimplifiedLayerNormalization", [floats(3, 4), floats(4)], {"epsilon": 1e-3}, domain=""
    ),
    "simplified with its root": Call(
        "SimplifiedLayerNormalization", [floats(3, 4), floats(4)], {}, (), ("y", "root"), ""
    ),
    "skip": Call("SkipLayerNormalization", [floats(B, T, D), floats(B, T, D), floats(D)]),
    "skip with all": Call(
        "SkipLayerNormalization",
        [floats(B, T, D), floats(B, T, D), floats(D), floats(D), floats(D)],
        {"epsilon": 1e-2}, (), ("y", "", "", "total"),
    ),
    "skip simplified": Call(
        "SkipSimplifiedLayerNormalization",
        [floats(B, T, D), floats(B, T, D), floats(D), floats(D)],
        {"epsilon": 1e-2}, (), ("y", "", "", "total"),
    ),
    "embeddings": Call(
        "EmbedLayerNormalization",
        [whole(11, B, T), whole(2, B, T), floats(11, D), floats(9, D), floats(2, D), floats(D),
         floats(D)], {}, (), ("y", "", "total"),
    ),
    "embeddings alone": Call(
        "EmbedLayerNormalization",
        [whole(11, B, T), None, floats(11, D), floats(9, D), None, floats(D), floats(D)],
        {"epsilon": 1e-3}, (), ("y", ""),
    ),
    "embeddings of a mask": Call(
        "EmbedLayerNormalization",
        [whole(11, B, T), None, floats(11, D), floats(9, D), None, floats(D), floats(D),
         np.array([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], np.int32)],
        {}, (), ("y", "counts"),
    ),
    "embeddings of given places": Call(
        "EmbedLayerNormalization",
        [whole(11, B, T), None, floats(11, D), floats(9, D), None, floats(D), floats(D), None,
         whole(9, B, T)], {}, (), ("y", ""),
    ),
    "attention": Call("Attention", [floats(B, T, D), *WEIGHTS], {"num_heads": H}),
    "attention of a mask": Call("Attention", [floats(B, T, D), *WEIGHTS, RAW], {"num_heads": H}),
    "attention of a mask for each query": Call(
        "Attention", [floats(B, T, D), *WEIGHTS, whole(2, B, T, T)], {"num_heads": H}
    ),
    "attention of lengths": Call(
        "Attention", [floats(B, T, D), *WEIGHTS, LENGTHS], {"num_heads": H}
    ),
    "attention forwards": Call(
        "Attention", [floats(B, T, D), *WEIGHTS, RAW], {"num_heads": H, "unidirectional": 1}
    ),
    "attention with a bias": Call(
        "Attention", [floats(B, T, D), *WEIGHTS, RAW, None, floats(B, H, T, T)],
        {"num_heads": H, "scale": 0.4},
    ),
    "attention of other widths": Call(
        "Attention", [floats(B, T, D), floats(D, 2 * D + 4), floats(2 * D + 4)],
        {"num_heads": H, "qkv_hidden_sizes": [D, D, 4]},
    ),
    "heads": Call(
        "MultiHeadAttention", [floats(B, T, D), floats(B, S, D), floats(B, S, 4)], {"num_heads": H}
    ),
    "heads with all": Call(
        "MultiHeadAttention",
        [floats(B, T, D), floats(B, S, D), floats(B, S, D), floats(3 * D), whole(2, B, S) | 1,
         floats(1, H, T, S)], {"num_heads": H, "scale": 0.3},
    ),
    "heads of lengths": Call(
        "MultiHeadAttention",
        [floats(B, T, D), floats(B, S, D), floats(B, S, D), None, LENGTHS], {"num_heads": H},
    ),
    "heads forwards": Call(
        "MultiHeadAttention", [floats(B, T, D)] * 3, {"num_heads": H, "unidirectional": 1}
    ),
    "rotary": Call("RotaryEmbedding", [floats(B, T, 3 * D), PLACES, *TABLES]),
    "rotary from a place": Call("RotaryEmbedding", [floats(B, T, 3 * D), FIRST, *TABLES]),
    "rotary by heads": Call("RotaryEmbedding", [floats(B, 3, T, D), PLACES, *TABLES]),
    "rotary interleaved": Call(
        "RotaryEmbedding", [floats(B, 3, T, D), PLACES, *TABLES], {"interleaved": 1}
    ),
}  # fmt: skip


def stock(call: Call) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(call.model().SerializeToString(), options)
    return session.run([n for n in call.outputs if n], call.feeds)


@pytest.mark.parametrize("name", CALLS)
def test_it_is_what_onnxruntime_computes(name: str, execute: Execute) -> None:
    call = CALLS[name]
    found = execute(from_onnx(call.model()), call.feeds)
    for output, want in zip([n for n in call.outputs if n], stock(call), strict=True):
        np.testing.assert_allclose(found[output], want, rtol=2e-5, atol=2e-6)


def test_every_op_has_a_call() -> None:
    known = {n.removeprefix(f"{DOMAIN}.") for n in DECOMPOSITIONS if n.startswith(f"{DOMAIN}.")}
    assert known == {call.op for call in CALLS.values()}


REFUSED: dict[str, tuple[Call, str]] = {
    "past keys": (
        Call("Attention", [floats(B, T, D), *WEIGHTS, None, floats(2, B, H, 3, 4)],
             {"num_heads": H}, (), ("y", "present")),
        "it has past keys",
    ),
    "packed keys": (
        Call("MultiHeadAttention", [floats(B, T, H, 3, 4)], {"num_heads": H}),
        "are packed, which is not supported",
    ),
    "the first and last keys": (
        Call("Attention", [floats(B, T, D), *WEIGHTS, np.array([5, 3, 0, 1], np.int32)],
             {"num_heads": H}),
        "has first and last places",
    ),
    "weights that are no constant": (
        Call("MatMulNBits", packed(4, False).given, packed(4, False).attrs),
        "MatMulNBits needs a constant as its input 1",
    ),
    "five bits": (
        Call("MatMulNBits", packed(4, False).given, {**packed(4, False).attrs, "bits": 5},
             fixed=(1, 2)),
        "its numbers have 5 bits",
    ),
    "queries before keys that are not theirs": (
        Call("MultiHeadAttention", [floats(B, T, D), floats(B, S, D), floats(B, S, D)],
             {"num_heads": H, "unidirectional": 1}),
        "look back on other keys than their own",
    ),
    "tables of another size": (
        Call("RotaryEmbedding", [floats(B, 3, T, D), PLACES, floats(16, 2), floats(16, 2)]),
        "its heads have 8 numbers, and its tables are for 4",
    ),
    "an op that is not known": (Call("NGramRepeatBlock", [floats(2)]), "is not standard ONNX"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused(name: str) -> None:
    call, said = REFUSED[name]
    with pytest.raises(ValueError, match=said):
        from_onnx(call.model())
