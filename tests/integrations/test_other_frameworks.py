"""The examples with flax.nnx and tf.Module: steps beside the gradients of their own frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from example_programs import example

STEPS, RATE = 20, 0.1

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


def test_a_flax_model_trains_as_by_jax() -> None:
    jax = pytest.importorskip("jax")
    nnx = pytest.importorskip("flax.nnx")
    pytest.importorskip("jax2onnx")
    program = example("jax_model")
    ours, losses = program.main(STEPS)
    theirs, rng = program.Classifier(nnx.Rngs(0)), np.random.default_rng(1)
    graph, state = nnx.split(theirs)

    def loss(state: Any, x: Any, labels: Any) -> Any:
        logits = jax.nn.log_softmax(nnx.merge(graph, state)(x))
        return -jax.numpy.take_along_axis(logits, labels[:, None], 1).mean()

    for number in range(STEPS):
        batch = program.batch(rng)
        value, grads = jax.value_and_grad(loss)(state, batch["x"], batch["labels"])
        state = jax.tree.map(lambda w, g: w - RATE * g, state, grads)
        assert losses[number] == pytest.approx(float(value), rel=1e-5)
    pairs = zip(jax.tree.leaves(nnx.split(ours)[1]), jax.tree.leaves(state), strict=True)
    for found, expected in pairs:
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_tensorflow_module_trains_as_by_tensorflow() -> None:
    tf = pytest.importorskip("tensorflow")
    pytest.importorskip("tf2onnx")
    program = example("tensorflow_module")
    ours, losses = program.main(STEPS)
    theirs, rng = program.Classifier(), np.random.default_rng(1)
    for number in range(STEPS):
        batch = program.batch(rng)
        with tf.GradientTape() as tape:
            logits = theirs(batch["x"])
            value = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(batch["labels"], logits)
            )
        for variable, grad in zip(
            theirs.trainable_variables,
            tape.gradient(value, theirs.trainable_variables),
            strict=True,
        ):
            variable.assign_sub(RATE * grad)
        assert losses[number] == pytest.approx(float(value), rel=1e-5)
    for found, expected in zip(ours.trainable_variables, theirs.trainable_variables, strict=True):
        np.testing.assert_allclose(found.numpy(), expected.numpy(), atol=1e-5)
