"""Keras models by Keras alone and with the step in Onward: seconds, memory, first batch."""

from __future__ import annotations

import importlib.util
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from suite.memory import Memory
from suite.progress import say
from suite.question import QuestionError, answer, ask
from suite.report import MIB, Writer, heading, markdown, started

BACKENDS = ("tensorflow", "jax", "torch")  # also the names of their packages
WITHOUT_XLA = "keras without XLA"
ENGINES = ("keras", WITHOUT_XLA, "onward")
# layers, width, heads, vocabulary, rows, tokens
SIZES: dict[str, dict[str, int]] = {
    "gpt2": {
        "layers": 4, "width": 512, "heads": 8, "vocabulary": 50257, "rows": 4, "tokens": 256,
    },
    "bert": {
        "layers": 4, "width": 512, "heads": 8, "vocabulary": 30522, "rows": 8, "tokens": 256,
    },
    "layers": {
        "layers": 4, "width": 256, "heads": 4, "vocabulary": 20000, "rows": 8, "tokens": 128,
    },
}  # fmt: skip
TINY = {"layers": 1, "width": 32, "heads": 2, "vocabulary": 100, "rows": 2, "tokens": 16}
ABOUT = {
    "gpt2": "keras_hub's GPT-2 with its tied head",
    "bert": "keras_hub's BERT and two classes, a quarter of the tokens padding",
    "layers": "MultiHeadAttention, LayerNormalization, Dense and a head",
}
WARM = 2  # batches of each engine before the timed ones
HEAD = [
    "backend", "model", "Keras, ms", "without XLA, ms", "Onward, ms", "Keras / Onward",
    "memory of Keras, MiB", "of Onward, MiB", "first batch of Keras, s", "of Onward, s",
]  # fmt: skip


def run(
    quick: bool, rounds: int, backends: str, models: str, write: Writer
) -> tuple[dict[str, Any], Path]:
    """One process for each backend and model, and one for each engine's memory."""
    report = started("Keras models by Keras and with the step in Onward") | {"rows": []}
    for backend in backends.split(","):
        if importlib.util.find_spec(backend) is None:
            say(f"{backend} is not installed")
            continue
        env = {"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"}
        for model in models.split(",") if models else SIZES:
            request: dict[str, Any] = {"model": model, "rounds": rounds, "backend": backend}
            request |= TINY if quick else SIZES[model]
            found = _asked(request, env)
            found["memory"] = {
                engine: _asked({**request, "only": engine}, env) for engine in ("keras", "onward")
            }
            report["rows"].append({"backend": backend, "model": model} | found)
            say(f"{backend} {model}: {found['ratio']:.2f}x")
    return report, write(report, table(report))


def _asked(request: Mapping[str, Any], env: Mapping[str, str]) -> Any:
    """The answer of a process, or of a second one: with JAX and TensorFlow in it, a process aborts
    now and then as it ends."""
    try:
        return ask("suite.keras_fit", request, env, timeout=1800.0)
    except QuestionError as error:
        say(f"once more: {error}")
        return ask("suite.keras_fit", request, env, timeout=1800.0)


def table(report: Mapping[str, Any]) -> str:
    """A row per backend and model."""
    rows = [
        [
            r["backend"], r["model"],
            *(f"{1e3 * s:.0f}" if (s := r["seconds"].get(e)) else "" for e in ENGINES),
            f"{r['ratio']:.2f} ({r['middle'][0]:.2f} to {r['middle'][1]:.2f})",
            *(f"{r['memory'][e] / MIB:.0f}" for e in ("keras", "onward")),
            *(f"{r['first'][e]:.1f}" for e in ("keras", "onward")),
        ]
        for r in report["rows"]
    ]  # fmt: skip
    said = [
        "Medians of `train_on_batch` in turn, AdamW, dropout 0.1, fp32; the ratio is that of the",
        "faster way of Keras, and in brackets are the quartiles of the rounds'. Memory is the",
        "highest resident set during the batches above that of the built model, in a process of",
        "its own. First batches count tracing and compilation.",
        *(f"{name}: {text}; {_size(report, name)}." for name, text in ABOUT.items()),
    ]
    return "\n".join([*heading(report), "", *said, "", *markdown(HEAD, rows, left=2)]) + "\n"


def _size(report: Mapping[str, Any], model: str) -> str:
    sizes = TINY if "--quick" in report["command"] else SIZES[model]
    return (
        f"{sizes['layers']} layers, {sizes['width']} wide, vocabulary {sizes['vocabulary']}, "
        f"{sizes['rows']} x {sizes['tokens']} tokens"
    )


# ---- the far side


def answered(request: dict[str, Any]) -> Any:
    """One model on the backend of the process, by all engines or by one."""
    warnings.simplefilter("ignore")
    if only := request.get("only"):
        return _memory(request, only)
    x, y = _batch(request)
    names = [e for e in ENGINES if e != WITHOUT_XLA or request["backend"] == "tensorflow"]
    models = {name: _built(request, name) for name in names}
    first, losses = {}, {}
    for name, model in models.items():
        begin = time.perf_counter()
        losses[name] = float(model.train_on_batch(x, y))
        first[name] = time.perf_counter() - begin
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(WARM + request["rounds"]):
        for name, model in models.items():
            begin = time.perf_counter()
            model.train_on_batch(x, y)
            seconds[name].append(time.perf_counter() - begin)
    timed = {name: found[WARM:] for name, found in seconds.items()}
    medians = {name: statistics.median(found) for name, found in timed.items()}
    best = min((name for name in names if name != "onward"), key=lambda name: medians[name])
    ratios = [a / b for a, b in zip(timed[best], timed["onward"], strict=True)]
    return {
        "first": first, "losses": losses, "seconds": medians, "best": best,
        "ratio": statistics.median(ratios), "middle": statistics.quantiles(ratios, n=4)[::2],
    }  # fmt: skip


def _memory(request: Mapping[str, Any], engine: str) -> int:
    """Bytes that the batches of an engine take beside the built model."""
    x, y = _batch(request)
    model = _built(request, engine)
    memory = Memory("cpu")
    before = memory.now()
    for _ in range(WARM):
        model.train_on_batch(x, y)  # tracing and compilation have peaks of their own
    memory.now()
    memory.reset_peak()
    for _ in range(WARM):
        model.train_on_batch(x, y)
    return memory.peak() - before


def _batch(request: Mapping[str, Any]) -> tuple[Any, Any]:
    import numpy as np

    rng = np.random.default_rng(0)
    shape = (request["rows"], request["tokens"])
    ids = rng.integers(0, request["vocabulary"], shape).astype("int32")
    mask = np.ones(shape, "int32")
    if request["model"] == "layers":
        return ids, np.roll(ids, -1, 1)
    if request["model"] == "gpt2":
        return {"token_ids": ids, "padding_mask": mask}, np.roll(ids, -1, 1)
    for i in range(shape[0]):
        mask[i, shape[1] - shape[1] * i // (2 * shape[0]) :] = 0
    x = {"token_ids": ids, "padding_mask": mask, "segment_ids": np.zeros_like(ids)}
    return x, rng.integers(0, 2, shape[:1])


def _built(request: Mapping[str, Any], engine: str) -> Any:
    import keras  # pyright: ignore[reportMissingImports]

    keras.utils.set_random_seed(0)
    model = MODELS[request["model"]](request)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    xla = {"jit_compile": False} if engine == WITHOUT_XLA else {}
    model.compile(keras.optimizers.AdamW(1e-4), loss, **xla)
    if engine == "onward":
        from onward.integrations.keras import accelerate

        accelerate(model)
    return model


def _hub(name: str, request: Mapping[str, Any]) -> Any:
    import keras_hub  # pyright: ignore[reportMissingImports]

    return getattr(keras_hub.models, name)(
        vocabulary_size=request["vocabulary"], num_layers=request["layers"],
        num_heads=request["heads"], hidden_dim=request["width"],
        intermediate_dim=4 * request["width"], dropout=0.1, max_sequence_length=request["tokens"],
    )  # fmt: skip


def _gpt2(request: Mapping[str, Any]) -> Any:
    import keras  # pyright: ignore[reportMissingImports]

    backbone = _hub("GPT2Backbone", request)
    logits = backbone.token_embedding(backbone.output, reverse=True)
    return keras.Model(backbone.input, logits)


def _bert(request: Mapping[str, Any]) -> Any:
    import keras  # pyright: ignore[reportMissingImports]

    backbone = _hub("BertBackbone", request)
    return keras.Model(backbone.input, keras.layers.Dense(2)(backbone.output["pooled_output"]))


def _layers(request: Mapping[str, Any]) -> Any:
    from keras import Input, Model, layers  # pyright: ignore[reportMissingImports]

    width, heads = request["width"], request["heads"]
    ids = Input((request["tokens"],), dtype="int32")
    x = layers.Embedding(request["vocabulary"], width)(ids)
    for _ in range(request["layers"]):
        mixed = layers.MultiHeadAttention(heads, width // heads, dropout=0.1)(
            x, x, use_causal_mask=True
        )
        x = layers.LayerNormalization(epsilon=1e-5)(x + layers.Dropout(0.1)(mixed))
        wide = layers.Dense(4 * width, activation="gelu")(x)
        made = layers.Dropout(0.1)(layers.Dense(width)(wide))
        x = layers.LayerNormalization(epsilon=1e-5)(x + made)
    return Model(ids, layers.Dense(request["vocabulary"])(x))


MODELS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "gpt2": _gpt2, "bert": _bert, "layers": _layers,
}  # fmt: skip


if __name__ == "__main__":
    answer(answered)
