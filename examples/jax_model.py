"""A flax.nnx model trained by Onward and given its weights back: python examples/jax_model.py

Needs `pip install jax flax jax2onnx`.
"""

import jax
import numpy as np
import onnx
from flax import nnx
from jax2onnx import to_onnx
from onnx import numpy_helper

import onward
from onward import loss


class Classifier(nnx.Module):
    """Two layers, a norm between them, three classes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first, self.norm = nnx.Linear(8, 32, rngs=rngs), nnx.LayerNorm(32, rngs=rngs)
        self.last = nnx.Linear(32, 3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.norm(jax.nn.gelu(self.first(x))))


def exported(model: nnx.Module) -> onnx.ModelProto:
    """The model as an ONNX file, whose weights have the names of the model's: they are arguments of
    the function that jax2onnx traces, and then become initializers."""
    graph, state = nnx.split(model)
    leaves, tree = jax.tree.flatten(state)

    def forward(*given: jax.Array) -> jax.Array:
        weights, x = given[:-1], given[-1]
        return nnx.merge(graph, jax.tree.unflatten(tree, weights))(x)

    specs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    specs.append(jax.ShapeDtypeStruct(("B", 8), "float32"))
    names = weight_names(model)
    file = to_onnx(forward, specs, input_names=[*names, "x"], output_names=["logits"], opset=21)
    for name, leaf in zip(names, leaves, strict=True):
        [given] = [i for i in file.graph.input if i.name == name]
        file.graph.input.remove(given)
        file.graph.initializer.append(numpy_helper.from_array(np.asarray(leaf), name))
    return file


def weight_names(model: nnx.Module) -> list[str]:
    """A name for each weight, such as first.kernel."""
    paths = jax.tree_util.tree_flatten_with_path(nnx.split(model)[1])[0]
    return [".".join(str(getattr(k, "key", k)) for k in path if hasattr(k, "key"))
            for path, _ in paths]  # fmt: skip


def give_back(model: nnx.Module, weights: dict[str, np.ndarray]) -> None:
    """Writes trained weights into the model."""
    _, state = nnx.split(model)
    _, tree = jax.tree.flatten(state)
    leaves = [jax.numpy.asarray(weights[name]) for name in weight_names(model)]
    nnx.update(model, jax.tree.unflatten(tree, leaves))


def batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Points around three corners, and which corner each is of."""
    labels = rng.integers(0, 3, 64)
    x = rng.standard_normal((64, 8)) + 3 * np.eye(8)[labels]
    return {"x": x.astype(np.float32), "labels": labels}


def main(steps: int = 100) -> tuple[nnx.Module, list[float]]:
    """Returns the trained model, and the loss of each step."""
    model = Classifier(nnx.Rngs(0))
    session = onward.TrainingSession(
        exported(model), onward.optim.SGD(lr=0.1), loss.cross_entropy("logits")
    )
    rng, losses = np.random.default_rng(1), list[float]()
    for number in range(1, steps + 1):
        losses.append(session.step(batch(rng)).loss)
        if number % 20 == 0:
            print(f"step {number}: loss {losses[-1]:.3f}")
    give_back(model, session.state_dict())
    test = batch(rng)
    right = float((np.asarray(model(test["x"])).argmax(1) == test["labels"]).mean())
    print(f"{right:.0%} right, by the flax model itself")
    return model, losses


if __name__ == "__main__":
    main()
