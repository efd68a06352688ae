"""A tf.Module trained by Onward and given its weights back: python examples/tensorflow_module.py

Needs `pip install tensorflow tf2onnx`.
"""

import numpy as np
import onnx
import tensorflow as tf
import tf2onnx
from onnx import numpy_helper

import onward
from onward import loss


class Classifier(tf.Module):
    """Two layers, three classes."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(0)
        self.first = tf.Variable(rng.normal(size=(8, 32)).astype("f") / 8, name="first")
        self.bias = tf.Variable(np.zeros(32, "f"), name="bias")
        self.last = tf.Variable(rng.normal(size=(32, 3)).astype("f") / 8, name="last")

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        return tf.nn.relu(x @ self.first + self.bias) @ self.last


def exported(module: tf.Module) -> onnx.ModelProto:
    """The module as an ONNX file, whose weights have the names of the module's variables: they are
    inputs of the function that tf2onnx converts, and then become initializers."""
    variables = {v.name.removesuffix(":0"): v for v in module.trainable_variables}
    specs = [tf.TensorSpec(v.shape, v.dtype, name=name) for name, v in variables.items()]
    specs.append(tf.TensorSpec((None, 8), tf.float32, name="x"))

    @tf.function(input_signature=specs)
    def forward(*given: tf.Tensor) -> dict[str, tf.Tensor]:
        held = {name: getattr(module, name) for name in variables}
        for name, value in zip(variables, given, strict=False):
            setattr(module, name, value)  # the tensor in place of the variable, while it is traced
        try:
            return {"logits": module(given[-1])}
        finally:
            for name, variable in held.items():
                setattr(module, name, variable)

    file, _ = tf2onnx.convert.from_function(forward, input_signature=specs, opset=18)
    for name, variable in variables.items():
        [given] = [i for i in file.graph.input if i.name == name]
        file.graph.input.remove(given)
        file.graph.initializer.append(numpy_helper.from_array(variable.numpy(), name))
    return file


def batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Points around three corners, and which corner each is of."""
    labels = rng.integers(0, 3, 64)
    x = rng.standard_normal((64, 8)) + 3 * np.eye(8)[labels]
    return {"x": x.astype(np.float32), "labels": labels}


def main(steps: int = 100) -> tuple[tf.Module, list[float]]:
    """Returns the trained module, and the loss of each step."""
    module = Classifier()
    session = onward.TrainingSession(
        exported(module), onward.optim.SGD(lr=0.1), loss.cross_entropy("logits")
    )
    rng, losses = np.random.default_rng(1), list[float]()
    for number in range(1, steps + 1):
        losses.append(session.step(batch(rng)).loss)
        if number % 20 == 0:
            print(f"step {number}: loss {losses[-1]:.3f}")
    weights = session.state_dict()
    for variable in module.trainable_variables:
        variable.assign(weights[variable.name.removesuffix(":0")])
    test = batch(rng)
    right = float((module(test["x"]).numpy().argmax(1) == test["labels"]).mean())
    print(f"{right:.0%} right, by the TensorFlow module itself")
    return module, losses


if __name__ == "__main__":
    main()
