"""A Keras model whose training step runs in Onward: python examples/keras_model.py

Needs `pip install 'onward[keras]'`, and a backend that KERAS_BACKEND names: tensorflow, jax, torch.
"""

import keras
import numpy as np
from keras import layers

from onward.integrations.keras import accelerate

WORDS, LENGTH = 32, 12


def language_model() -> keras.Model:
    """A decoder of one block, of Keras's own layers."""
    ids = keras.Input((LENGTH,), dtype="int32")
    x = layers.Embedding(WORDS, 32)(ids)
    h = layers.LayerNormalization()(x)
    h = layers.MultiHeadAttention(2, 16, dropout=0.1)(h, h, use_causal_mask=True)
    x = layers.Add()([x, layers.Dropout(0.1)(h)])
    h = layers.Dense(64, activation="gelu")(layers.LayerNormalization()(x))
    x = layers.Add()([x, layers.Dense(32)(h)])
    return keras.Model(ids, layers.Dense(WORDS)(x))


def main() -> list[float]:
    """Returns the loss of each epoch."""
    keras.utils.set_random_seed(0)
    start = np.random.default_rng(0).integers(0, WORDS, (256, 1))
    rows = (start + 3 * np.arange(LENGTH + 1)) % WORDS  # each word is the one before and 3
    model = language_model()
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    accelerate(model)
    history = model.fit(rows[:, :-1], rows[:, 1:], batch_size=32, epochs=6, verbose=2)
    found = model.evaluate(rows[:, :-1], rows[:, 1:], verbose=0, return_dict=True)
    print(f"{found['accuracy']:.0%} of the words told")
    return [float(loss) for loss in history.history["loss"]]


if __name__ == "__main__":
    main()
