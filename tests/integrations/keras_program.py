"""Runs of Keras models, by Keras alone and with the step in Onward, on the backend KERAS_BACKEND.

`python keras_program.py CASE...` prints a line of JSON for each case; `fit_both` is Keras's own
`fit` on two models of equal weights, one of which is accelerated.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np

from onward.errors import OnwardError
from onward.integrations.keras import accelerate, steps_in, trainer_of
from onward.integrations.keras_package import keras, package

layers, ops = keras.layers, keras.ops

ROWS, BATCH, LENGTH, WORDS = 76, 8, 7, 50  # the last batch of an epoch has 4 rows
Found = dict[str, Any]
CASES: dict[str, Callable[[], Found]] = {}


def case(function: Callable[[], Found]) -> Callable[[], Found]:
    CASES[function.__name__] = function
    return function


class Losses(keras.callbacks.Callback):
    """The logs of every batch."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, float]] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append({name: float(value) for name, value in logs.items()})


def whole(kind: type) -> type:
    """An optimizer that takes whole gradients. Keras on TensorFlow gives the rows of a table that a
    batch reads twice as two pieces, whose squares Adam adds up in place of squaring their sum."""

    class Whole(kind):
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            import tensorflow

            dense = [None if g is None else tensorflow.convert_to_tensor(g) for g in grads]
            return super().apply(dense, trainable_variables)

    return Whole


def optimizer(name: str = "sgd", **options: Any) -> Any:
    kinds = {
        "sgd": (keras.optimizers.SGD, {"learning_rate": 0.1}),
        "momentum": (keras.optimizers.SGD, {"learning_rate": 0.05, "momentum": 0.9}),
        "adam": (keras.optimizers.Adam, {"learning_rate": 1e-3, "epsilon": 1e-3}),
        "adamw": (keras.optimizers.AdamW, {"learning_rate": 1e-3, "epsilon": 1e-3}),
        "rmsprop": (keras.optimizers.RMSprop, {"learning_rate": 1e-4, "epsilon": 1e-3}),
        "lion": (keras.optimizers.Lion, {"learning_rate": 1e-4}),
    }
    kind, defaults = kinds[name]
    kind = whole(kind) if keras.backend.backend() == "tensorflow" else kind
    return kind(**{**defaults, **options})


def words(seed: int = 0, low: int = 0) -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.default_rng(seed).integers(low, WORDS, (ROWS, LENGTH)).astype("int32")
    return ids, np.roll(ids, 1, 1)


def transformer(drop: float = 0.0, mask: bool = False, ends: str = "logits") -> Any:
    """A small decoder, of Keras's own layers."""
    given = keras.Input((LENGTH,), dtype="int32", name="ids")
    x = layers.Embedding(WORDS, 16, mask_zero=mask)(given)
    h = layers.LayerNormalization()(x)
    h = layers.MultiHeadAttention(2, 8, dropout=drop)(h, h, use_causal_mask=True)
    x = layers.Add()([x, layers.Dropout(drop)(h)])
    h = layers.LayerNormalization()(x)
    h = layers.Dense(16)(layers.Dense(32, activation="gelu")(h))
    x = layers.Add()([x, h])
    last = {"logits": None, "softmax": "softmax"}[ends]
    return keras.Model(given, layers.Dense(WORDS, activation=last)(x))


def cross_entropy(from_logits: bool = True) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)


def fit_both(
    make: Callable[[], Any],
    x: Any,
    y: Any,
    compiled: Callable[[], dict[str, Any]],
    epochs: int = 2,
    callbacks: Callable[[], list[Any]] = list,
    **options: Any,
) -> Found:
    """What Keras and Onward find: logs of every batch and epoch, and the weights at the end."""
    found = dict[str, Any]()
    first: list[np.ndarray] | None = None
    for who in ("keras", "onward"):
        keras.utils.set_random_seed(0)
        model = make()
        model.compile(**compiled())
        if first is None:
            first = [w.copy() for w in model.get_weights()]
        for weight, before in zip(model.weights, first, strict=True):
            if weight.dtype == "float32":
                weight.assign(before)
        if who == "onward":
            assert accelerate(model) is model
        losses = Losses()
        history = model.fit(
            x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0,
            callbacks=[losses, *callbacks()], **options,
        )  # fmt: skip
        found[who] = {
            "batches": losses.seen,
            "epochs": {k: [float(v) for v in vs] for k, vs in history.history.items()},
            "weights": {v.path: np.asarray(v.numpy(), np.float64) for v in model.trainable_weights},
            "others": [
                np.asarray(v.numpy(), np.float64)
                for v in model.non_trainable_weights
                if v.dtype == "float32"
            ],
            "steps": int(ops.convert_to_numpy(model.optimizer.iterations)),
            "rate": float(ops.convert_to_numpy(model.optimizer.learning_rate)),
            "model": model,
        }
        if first is not None and who == "onward":
            found["moved"] = float(
                max(np.abs(a - b).max() for a, b in zip(model.get_weights(), first, strict=True))
            )
    return found


def compared(found: Found) -> Found:
    """The largest differences, as the test reads them."""
    ours, theirs = found["onward"], found["keras"]
    near = [
        abs(a[name] - b[name]) / max(abs(b[name]), 1e-3)
        for a, b in zip(ours["batches"], theirs["batches"], strict=True)
        for name in b
    ]
    epochs = [
        abs(p - q) / max(abs(q), 1e-3)
        for name, values in theirs["epochs"].items()
        for p, q in zip(ours["epochs"][name], values, strict=True)
    ]
    weights = {
        path: float(np.abs(array - theirs["weights"].get(path, other)).max())
        for (path, array), other in zip(
            ours["weights"].items(), theirs["weights"].values(), strict=True
        )
        # the gradient of a key's bias is rounding alone, which Adam enlarges
        if not path.endswith("key/bias")
    }
    others = [
        float(np.abs(a - b).max()) for a, b in zip(ours["others"], theirs["others"], strict=True)
    ]
    return {
        "batches": len(near),
        "logs": max(near),
        "names": sorted(ours["batches"][0]) == sorted(theirs["batches"][0]),
        "epochs": max(epochs),
        "weights": max(weights.values()),
        "others": max(others, default=0.0),
        "steps": [ours["steps"], theirs["steps"]],
        "rate": [ours["rate"], theirs["rate"]],
        "moved": found["moved"],
    }


def language(name: str = "sgd", **options: Any) -> Found:
    x, y = words()
    return compared(
        fit_both(
            transformer, x, y,
            lambda: {"optimizer": optimizer(name, **options), "loss": cross_entropy(),
                     "metrics": ["accuracy"]},
        )
    )  # fmt: skip


# ---- the same numbers


@case
def sgd() -> Found:
    return language("sgd")


@case
def momentum() -> Found:
    return language("momentum", nesterov=True)


@case
def adam() -> Found:
    return language("adam")


@case
def adamw_with_schedule_and_clipping() -> Found:
    rate = keras.optimizers.schedules.CosineDecay(1e-3, 20, warmup_target=2e-3, warmup_steps=5)
    return language("adamw", learning_rate=rate, global_clipnorm=0.5, weight_decay=0.1)


@case
def rmsprop_with_average() -> Found:
    return language("rmsprop", use_ema=True, clipnorm=0.1)


@case
def accumulation() -> Found:
    return language("sgd", gradient_accumulation_steps=2)


@case
def padding_and_validation() -> Found:
    """Words of 0 are masked in attention, loss and metrics."""
    x, y = words(1, low=1)  # a first word of 0 would attend to nothing
    # Keras on JAX counts padded places in metrics, though nothing is computed there for use
    metrics = [] if keras.backend.backend() == "jax" else ["accuracy"]
    x[:, 5:] = np.where(np.arange(ROWS)[:, None] % 3, 0, x[:, 5:])
    return compared(
        fit_both(
            lambda: transformer(mask=True), x, y,
            lambda: {"optimizer": optimizer(), "loss": cross_entropy(), "metrics": metrics},
            validation_data=(x, y),
        )
    )  # fmt: skip


@case
def probabilities() -> Found:
    x, y = words(2)
    return compared(
        fit_both(
            lambda: transformer(ends="softmax"), x, y,
            lambda: {"optimizer": optimizer(), "loss": "sparse_categorical_crossentropy"},
        )
    )  # fmt: skip


def numbers(width: int = 5, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, width)).astype("float32")


def perceptron() -> Any:
    """Two outputs of one trunk, with regularizers, and a bias of one number."""
    given = keras.Input((5,), name="numbers")
    h = layers.Dense(8, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))(given)
    h = layers.ActivityRegularization(l1=0.01)(h)
    value = layers.Dense(1, name="value")(h)
    sort = layers.Dense(3, name="sort", bias_regularizer=keras.regularizers.L1(0.01))(h)
    return keras.Model(given, {"value": value, "sort": sort})


@case
def two_outputs() -> Found:
    x = numbers()
    y = {"value": x[:, :1] * 2 + 1, "sort": np.eye(3, dtype="float32")[np.argmax(x[:, :3], 1)]}
    return compared(
        fit_both(
            perceptron, x, y,
            lambda: {
                "optimizer": optimizer(),
                "loss": {"value": "mse",
                         "sort": keras.losses.CategoricalCrossentropy(from_logits=True)},
                "loss_weights": {"value": 0.5, "sort": 2.0},
                "metrics": {"sort": ["accuracy"], "value": ["mae"]},
            },
        )
    )  # fmt: skip


@case
def sample_weights() -> Found:
    x = numbers()
    y = (x[:, :1] > 0).astype("float32")
    weight = np.linspace(0, 2, ROWS).astype("float32")
    return compared(
        fit_both(
            lambda: keras.Sequential(
                [keras.Input((5,)), layers.Dense(8, activation="relu"), layers.Dense(1)]
            ), x, y,
            lambda: {"optimizer": optimizer("adam"),
                     "loss": keras.losses.BinaryCrossentropy(from_logits=True),
                     "weighted_metrics": ["accuracy"]},
            sample_weight=weight,
        )
    )  # fmt: skip


class Pair(keras.Model):
    """A subclassed model of two named inputs, with a loss of its own beside that of `compile`."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = layers.Dense(6, activation="silu"), layers.Dense(6)
        self.norm, self.end = layers.BatchNormalization(), layers.Dense(4)
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, given: Any, training: bool = False) -> Any:
        h = self.norm(self.left(given["a"]) * self.right(given["b"]), training=training)
        self.add_loss(0.1 * ops.mean(ops.square(h)))
        return self.end(h * self.scale)

    def build(self, shapes: Any) -> None:
        self.left.build(shapes["a"])
        self.right.build(shapes["b"])
        self.norm.build((None, 6))
        self.end.build((None, 6))
        self.built = True


def pair() -> Any:
    model = Pair()
    model.build({"a": (None, 5), "b": (None, 3)})
    return model


@case
def subclassed_with_batch_norm_and_class_weight() -> Found:
    x = {"a": numbers(), "b": numbers(3, 4)}
    y = np.random.default_rng(5).integers(0, 4, ROWS)
    return compared(
        fit_both(
            pair, x, y,
            lambda: {"optimizer": optimizer("sgd"), "loss": cross_entropy(),
                     "metrics": ["accuracy"]},
            class_weight={0: 1.0, 1: 2.0, 2: 0.5, 3: 1.5},
        )
    )  # fmt: skip


@case
def callbacks() -> Found:
    """Callbacks that read and write: rates that fall, weights that are saved and put back."""
    x, y = words(6)

    def made() -> list[Any]:
        return [
            keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=0, min_delta=10.0),
            keras.callbacks.EarlyStopping(monitor="loss", patience=2, min_delta=10.0,
                                          restore_best_weights=True),
        ]  # fmt: skip

    return compared(
        fit_both(
            transformer, x, y,
            lambda: {"optimizer": optimizer("momentum"), "loss": cross_entropy()},
            epochs=5, callbacks=made,
        )
    )  # fmt: skip


def partly_frozen() -> Any:
    model = transformer()
    model.layers[1].trainable = False
    return model


@case
def frozen_layer() -> Found:
    x, y = words(7)
    return compared(
        fit_both(
            partly_frozen, x, y, lambda: {"optimizer": optimizer("adam"), "loss": cross_entropy()}
        )
    )


# ---- keras_hub

SMALL: dict[str, Any] = {
    "vocabulary_size": WORDS, "num_layers": 2, "num_heads": 2, "hidden_dim": 16,
    "intermediate_dim": 32, "dropout": 0.0,
}  # fmt: skip


def hub() -> Any:
    return package("keras_hub.models")


def padding(x: np.ndarray) -> np.ndarray:
    """A mask of words that hides the ends of every third row."""
    mask = np.ones_like(x)
    mask[::3, 4:] = 0
    return mask


@case
def hub_bert() -> Found:
    def made() -> Any:
        backbone = hub().BertBackbone(**SMALL, max_sequence_length=LENGTH)
        return keras.Model(backbone.input, layers.Dense(4)(backbone.output["pooled_output"]))

    x, _ = words(8)
    mask = padding(x)
    given = {"token_ids": x, "padding_mask": mask, "segment_ids": (x % 2).astype("int32")}
    return compared(
        fit_both(
            made, given, x[:, 0] % 4,
            lambda: {"optimizer": optimizer("adamw"), "loss": cross_entropy(),
                     "metrics": ["accuracy"]},
        )
    )  # fmt: skip


@case
def hub_gpt2() -> Found:
    def made() -> Any:
        backbone = hub().GPT2Backbone(**SMALL, max_sequence_length=LENGTH)
        return hub().GPT2CausalLM(backbone)

    x, y = words(9)
    mask = padding(x)
    return compared(
        fit_both(
            made, {"token_ids": x, "padding_mask": mask}, y,
            lambda: {"optimizer": optimizer("adam"), "loss": cross_entropy(),
                     "weighted_metrics": ["accuracy"]},
            sample_weight=mask.astype("float32"),
        )
    )  # fmt: skip


@case
def hub_t5() -> Found:
    def made() -> Any:
        backbone = hub().T5Backbone(**SMALL)
        states = backbone.output["decoder_sequence_output"]
        return keras.Model(backbone.input, backbone.token_embedding(states, reverse=True))

    x, y = words(10)
    mask = padding(x)
    given = {
        "encoder_token_ids": x, "encoder_padding_mask": mask, "decoder_token_ids": y,
        "decoder_padding_mask": np.ones_like(y),
    }  # fmt: skip
    return compared(
        fit_both(
            made, given, np.roll(y, -1, 1),
            lambda: {"optimizer": optimizer("sgd", learning_rate=1e-3), "loss": cross_entropy()},
        )
    )  # fmt: skip


# ---- dropout


@case
def dropout() -> Found:
    """What a dropout of rate 0.25 leaves, in training, evaluation and prediction."""
    given = keras.Input((400,))
    model = keras.Model(given, layers.Dropout(0.25)(layers.Dense(400, use_bias=False)(given)))
    model.compile(optimizer("sgd", learning_rate=0.0), "mse")
    model.set_weights([np.eye(400, dtype="float32")])
    accelerate(model)
    seen = list[Any]()
    steps: Any = steps_in(model)
    run = steps.run

    def kept(*args: Any) -> Any:
        loss, outputs = run(*args)
        seen.append(np.asarray(outputs["output_0"]))
        return loss, outputs

    steps.run = kept
    steps.wanted = lambda program, has_metrics: program.forward.names()[1:]
    x, zeros = np.ones((64, 400), "float32"), np.zeros((64, 400), "float32")
    for _ in range(3):
        model.train_on_batch(x, zeros)
    drops = [float((y == 0).mean()) for y in seen]
    kinds = sorted({round(float(v), 4) for y in seen for v in np.unique(y)})
    rows = float(np.corrcoef(seen[0][0], seen[0][1])[0, 1])
    return {
        "drops": drops, "kinds": kinds, "again": float((seen[0] == seen[1]).mean()),
        "rows": rows, "evaluated": float(model.evaluate(x, zeros, verbose=0)),
        "predicted": float(model.predict(x, verbose=0).mean()),
    }  # fmt: skip


@case
def attention_dropout() -> Found:
    """Dropouts of a transformer, that inside of attention among them, are in the graph."""
    x, y = words(11)
    model = transformer(drop=0.3)
    model.compile(optimizer("sgd"), cross_entropy())
    accelerate(model)
    history = model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    launches = trainer_of(model).plan.launches
    found = sum("Dropout" in launch.op for launch in launches)
    return {"launches": found, "losses": [float(v) for v in history.history["loss"]]}


# ---- files and other doors


@case
def saved_and_gone_on() -> Found:
    """A model that is saved in the middle goes on as one that was not; its optimizer too."""
    import tempfile
    from pathlib import Path

    x, y = words(12)
    keras.utils.set_random_seed(0)
    model = transformer()
    model.compile(optimizer("momentum"), cross_entropy())
    accelerate(model)
    model.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
    path = Path(tempfile.mkdtemp()) / "model.keras"
    model.save(path)
    again = keras.models.load_model(path, {"Whole": whole(keras.optimizers.SGD)})
    ends = []
    for one in (model, again):
        history = one.fit(x, y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0)
        ends.append(float(history.history["loss"][0]))
    return {"ends": ends, "steps": int(ops.convert_to_numpy(again.optimizer.iterations))}


# ---- refusals


def refusal(made: Callable[[], Any], x: Any, y: Any, **options: Any) -> str:
    """The line in which a model is refused; empty where it trains."""
    try:
        model = made()
        accelerate(model, options or None)
        model.fit(x, y, batch_size=BATCH, verbose=0)
    except OnwardError as error:
        return str(error)
    return ""


class OwnStep(keras.Sequential):
    """A model with a train_step of its own."""

    def train_step(self, *args: Any) -> Any:
        return super().train_step(*args)


@case
def refusals() -> Found:
    x, y = numbers(), numbers(1, 4)

    def with_layer(layer: Any, **compiled: Any) -> Callable[[], Any]:
        def made() -> Any:
            model = keras.Sequential([keras.Input((5,)), layer(), layers.Dense(1)])
            model.compile("sgd", "mse", **compiled)
            return model

        return made

    def own() -> Any:
        model = OwnStep([keras.Input((5,)), layers.Dense(1)])
        model.compile("sgd", "mse")
        return model

    found = {
        "noise": refusal(with_layer(lambda: layers.GaussianNoise(0.1, name="noisy")), x, y),
        "shape": refusal(
            with_layer(lambda: layers.Dropout(0.1, noise_shape=(None, 1), name="slices")), x, y
        ),
        "half": refusal(
            with_layer(lambda: layers.Dense(3, dtype="mixed_bfloat16", name="half")), x, y
        ),
        "eager": refusal(with_layer(lambda: layers.Dense(3), run_eagerly=True), x, y),
        "own": refusal(own, x, y),
        "options": refusal(with_layer(lambda: layers.Dense(3)), x, y, max_grad_norm=1.0),
        "uncompiled": refusal(lambda: keras.Sequential([layers.Dense(1)]), x, y),
    }
    return found


def main(names: list[str]) -> None:
    for name in names or list(CASES):
        try:
            found = CASES[name]()
        except OnwardError as error:
            found = {"refused": str(error)}
        except Exception:
            found = {"error": traceback.format_exc()[-3000:]}
        print(json.dumps({"case": name, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
