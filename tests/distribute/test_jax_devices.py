"""Sharded layers in lockstep beside JAX's own sharding on four forced host devices: Megatron-LM's
MLP and attention, forward and gradients. Skipped where JAX is not installed (`onward[oracles]`)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sharded_steps as steps
import tiny
import torch
from jax_devices_program import RANKS
from torch import Tensor, nn

from onward.differentiate import vjp
from onward.distribute import lockstep, ranks_of
from onward.distribute.tensor.sharding import split

pytestmark = [
    pytest.mark.usefixtures("captures_kept"),
    pytest.mark.skipif(
        importlib.util.find_spec("jax") is None, reason="needs JAX: pip install 'onward[oracles]'"
    ),
]
WIDTH, HEADS, INNER = 32, 8, 64
SHAPES = {"up": (WIDTH, INNER), "down": (INNER, WIDTH), **dict.fromkeys("qkv", (WIDTH, WIDTH))}
SHAPES["out"] = (WIDTH, WIDTH)
Arrays = dict[str, np.ndarray]


class Layer(nn.Module):
    """A layer without biases, and a loss whose gradient with respect to its output is `dy`."""

    def __init__(self, given: Arrays, weights: tuple[str, ...]) -> None:
        super().__init__()
        for name in weights:
            setattr(self, name, nn.Parameter(torch.from_numpy(given[name].copy())))

    def layer(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
        y = self.layer(x)
        return {"loss": (y * dy).sum(), "y": y}


class Perceptron(Layer):
    """x f32[B,T,D] through one hidden layer."""

    up: Tensor
    down: Tensor

    def layer(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(x @ self.up) @ self.down


class SelfAttention(Layer):
    """Causal attention of x f32[B,T,D]."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor

    def layer(self, x: Tensor) -> Tensor:
        def heads(w: Tensor) -> Tensor:
            return (x @ w).view(*x.shape[:2], HEADS, -1).transpose(1, 2)

        y = nn.functional.scaled_dot_product_attention(
            heads(self.q), heads(self.k), heads(self.v), is_causal=True
        )
        return y.transpose(1, 2).flatten(2) @ self.out


@pytest.fixture(scope="module")
def given() -> Arrays:
    rng = np.random.default_rng(0)
    drawn = {name: rng.normal(size=shape) / shape[0] ** 0.5 for name, shape in SHAPES.items()}
    drawn |= {name: rng.normal(size=(3, 6, WIDTH)) for name in ("x", "dy")}
    return {name: array.astype(np.float32) for name, array in drawn.items()}


@pytest.fixture(scope="module")
def wanted(given: Arrays, tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    """What JAX makes, in a process whose devices are forced."""
    folder = tmp_path_factory.mktemp("jax")
    np.savez(folder / "in.npz", heads=np.array(HEADS), **given)  # type: ignore[arg-type]
    program = Path(__file__).with_name("jax_devices_program.py")
    subprocess.run([sys.executable, program, folder / "in.npz", folder / "out.npz"], check=True)
    with np.load(folder / "out.npz") as found:
        return dict(found)


@pytest.mark.parametrize(
    ("kind", "name", "weights"),
    [(Perceptron, "mlp", ("up", "down")), (SelfAttention, "attention", ("q", "k", "v", "out"))],
)
def test_ranks_make_what_jax_makes(
    kind: type[Layer], name: str, weights: tuple[str, ...], given: Arrays, wanted: Arrays
) -> None:
    data = {n: torch.from_numpy(given[n]) for n in ("x", "dy")}
    model = steps.Made(name, tiny.compiled(kind(given, weights).train(), data), 0)
    forward, parameters = model.call.forward, sorted(model.call.captured.reached)
    graph = vjp(forward, forward.signature.differentiated_outputs, parameters, parameters)
    meshes = ranks_of(("tp",), (RANKS,))
    graphs, cuts = steps.ranks_graphs(graph, meshes, {"B": 64, "T": 64}, rewritten=False)
    assert {n.removeprefix("param."): cut.sharding for n, cut in cuts[0].items()} == {
        w: split(0) if w in ("down", "out") else split(1) for w in weights
    }
    whole = steps.feeds(graph, model, data)
    feeds = [steps.parts(whole, graph, g, c) for g, c in zip(graphs, cuts, strict=True)]
    [made] = steps.joined(graph, meshes, lockstep(meshes, graphs, feeds), cuts)
    [y] = [made[n] for n in made if n.endswith("y")]
    np.testing.assert_allclose(y, wanted[name], rtol=1e-5, atol=1e-5)
    for w in weights:
        gradient = made[graph.signature.gradients[f"param.{w}"]]
        want = wanted[f"{name}.{w}"]
        np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
