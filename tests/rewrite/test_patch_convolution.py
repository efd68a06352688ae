"""Convolutions that tile what they read are products; others stay. The oracle is onnx's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from tiny_families import assert_same
from torch import nn

from onward.graph.build import Builder
from onward.graph.check import check
from onward.graph.evaluate import evaluate
from onward.graph.graph import Graph, Role, Value
from onward.graph.types import Type, parse_type
from onward.rewrite.patch_convolution import patch_convolution


def graph_of(
    x: str, w: str, bias: bool = True, perm: tuple[int, ...] = (), flat: bool = True, **attrs: Any
) -> Graph:
    """A convolution and what turns its places into rows."""
    graph = Graph()
    types = [parse_type(x), parse_type(w)]
    inputs: list[Value] = [graph.input(f"x{i}", t, Role.BATCH) for i, t in enumerate(types)]
    if bias:
        inputs.append(graph.input("x2", types[1].with_shape(types[1].shape[:1]), Role.BATCH))
    b = Builder(graph)
    y: Value = b.Conv(*inputs, **attrs)
    if flat:
        n, m, *places = y.meta["type"].shape
        y = b.reshape(y, (n, m, int(np.prod(places))))
    graph.outputs = {"y": b.transpose(y, perm or (0, 2, 1))}
    return graph


CALLS: dict[str, Graph] = {
    "squares": graph_of("f32[2,3,8,4]", "f32[5,3,4,4]", strides=[4, 4]),
    "without a bias": graph_of("f32[2,3,8,4]", "f32[5,3,2,4]", bias=False, strides=[2, 4]),
    "a rest": graph_of("f32[1,2,9,7]", "f32[3,2,4,3]", strides=[4, 3]),
    "a line": graph_of("f32[2,2,8]", "f32[3,2,2]", strides=[2]),
    "a volume": graph_of("f32[1,2,2,4,6]", "f32[3,2,2,2,3]", strides=[2, 2, 3]),
    "channels last": graph_of(
        "f32[2,3,8,4]", "f32[5,3,4,2]", strides=[4, 2], flat=False, perm=(0, 2, 3, 1)
    ),
}
LEFT: dict[str, Graph] = {
    "steps": graph_of("f32[2,3,8,4]", "f32[5,3,4,4]", strides=[2, 2]),
    "pads": graph_of("f32[2,3,8,4]", "f32[5,3,4,4]", strides=[4, 4], pads=[2, 0, 2, 0]),
    "holes": graph_of("f32[2,3,8,8]", "f32[5,3,2,2]", strides=[2, 2], dilations=[2, 2]),
    "groups": graph_of("f32[2,4,8,4]", "f32[4,2,4,4]", strides=[4, 4], group=2),
    "single elements": graph_of("f32[2,4,8,4]", "f32[4,4,1,1]"),
    "channels first": graph_of(
        "f32[2,3,8,4]", "f32[5,3,4,4]", strides=[4, 4], flat=False, perm=(0, 1, 3, 2)
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_tiled_becomes_a_product(name: str) -> None:
    graph = CALLS[name].clone()
    rng = np.random.default_rng(0)
    types: list[Type] = [v.meta["type"] for v in graph.inputs]
    feeds = {
        f"x{i}": rng.standard_normal([int(n) for n in t.shape]).astype(np.float32)  # type: ignore[arg-type]
        for i, t in enumerate(types)
    }
    want = evaluate(graph, feeds)["y"]
    assert patch_convolution(graph) == 1
    check(graph)
    assert [n.op_type for n in graph if n.op_type in ("Conv", "Gemm")] == ["Gemm"]
    np.testing.assert_allclose(evaluate(graph, feeds)["y"], want, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", LEFT)
def test_others_stay_as_they_are(name: str) -> None:
    graph = LEFT[name].clone()
    assert patch_convolution(graph) == 0


class Patches(nn.Module):
    """A patch embedding behind a convolution, so that its input takes a gradient too."""

    def __init__(self, kernel: tuple[int, int], flat: bool) -> None:
        super().__init__()
        self.before, self.embed = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(3, 12, kernel, kernel)
        self.norm, self.flat = nn.LayerNorm(12), flat

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.embed(self.before(x))
        y = y.flatten(2).transpose(1, 2) if self.flat else y.permute(0, 2, 3, 1)
        return (self.norm(y).square() * (torch.arange(12) - 1.5)).mean()


@pytest.mark.parametrize("kernel", [(4, 4), (4, 3)])
@pytest.mark.parametrize("flat", [True, False])
def test_patches_train_without_a_copy_of_the_result(kernel: tuple[int, int], flat: bool) -> None:
    torch.manual_seed(0)
    model = tiny.ready(Patches(kernel, flat))
    batches = [{"x": torch.randn(n, 3, 16, 16)} for n in (2, 2, 3, 3, 4)]
    made = tiny.compiled(model, batches[0])
    graph = made.differentiated(tiny.trained(made))
    wanted = [n for n in graph.outputs if n == "loss" or n.startswith("grad.")]
    assert_same([tiny.plain(tiny.execute(made, graph, x, wanted)) for x in batches], model, batches)
    dims = made.captured.dims([batches[0]["x"]])
    assert dims is not None
    launches = [launch.op for launch in made.plan(graph, wanted, dims).launches]
    assert launches[launches.index("Gemm") + 1] == "LayerNormalization"
