"""Models by each converter to ONNX: opened, compared with onnxruntime, trained for eight steps.

    python tests/onnx_models/converters.py [--only NAME] [--write]

Converters that are not installed keep their rows of `converters.json`, of which docs/onnx_files.md
has a table. Torch's newer exporter needs onnxscript; the others are skl2onnx, tf2onnx and jax2onnx
with their frameworks.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import onnx

HERE = Path(__file__).resolve().parent
OUTCOMES = HERE / "converters.json"
STEPS, SECONDS = 8, 300
JUDGED = 6  # weights whose gradients are compared with differences
Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """A model by a converter. package: the converter. needs: modules that have to be there. make:
    the model, a batch and the loss."""

    package: str
    needs: tuple[str, ...]
    make: Callable[[], tuple[onnx.ModelProto, Batch, Any]]


def likely(b: Any, p: Any, target: Any) -> Any:
    """The mean of -log of the probability that the right class has; p: f32[B,C]."""
    right = b.GatherElements(p, b.unsqueeze(target, [1]), axis=1)
    return b.Neg(b.ReduceMean(b.Log(b.Add(right, 1e-7)), keepdims=0))


def likely_of(output: str) -> Any:
    """The loss `likely` of an output of that name."""
    from onward import loss

    return loss.function(likely, {"target": loss.Like(output, "i64", 1)}, {"p": output})


def tokens(rows: int = 4, length: int = 12) -> Batch:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 100, (rows, length))
    return {"ids": ids, "mask": np.ones_like(ids), "labels": ids}


def by_torch(kind: str, modern: bool) -> tuple[onnx.ModelProto, Batch, Any]:
    """A tiny transformer of transformers by one of torch's exporters."""
    import torch
    import transformers

    from onward import loss

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    models: dict[str, Callable[[], Any]] = {
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=100, n_embd=32, n_head=4, n_layer=2, n_positions=32, bos_token_id=0,
                eos_token_id=0, use_cache=False,
            )
        ),
        "bert": lambda: transformers.BertForMaskedLM(
            transformers.BertConfig(**sizes, intermediate_size=64, max_position_embeddings=32)
        ),
        "llama": lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **sizes, intermediate_size=64, num_key_value_heads=2, use_cache=False,
                bos_token_id=0, eos_token_id=0,
            )
        ),
    }  # fmt: skip

    class Logits(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = models[kind]()
            with torch.no_grad():  # exporters store equal tensors once
                for parameter in self.inner.parameters():
                    parameter.add_(0.02 * torch.randn_like(parameter))

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids=ids, attention_mask=mask).logits

    batch, model = tokens(), Logits().eval()
    given = {name: torch.tensor(batch[name]) for name in ("ids", "mask")}
    open_sizes: dict[str, Any] = {name: {0: "B", 1: "T"} for name in given}
    more: dict[str, Any] = {"dynamic_axes": open_sizes, "opset_version": 17}
    if modern:
        dims = {0: torch.export.Dim("B"), 1: torch.export.Dim("T")}
        more = {"dynamic_shapes": dict.fromkeys(given, dims), "external_data": False}
    path = Path(f"{kind}.onnx")
    torch.onnx.export(  # noqa: TID251 - files that other tools write are what is tried
        model, tuple(given.values()), path, input_names=list(given), output_names=["logits"],
        dynamo=modern, **more,
    )  # fmt: skip
    return onnx.load(path), batch, loss.cross_entropy("logits", shift=kind != "bert")


def by_sklearn(kind: str) -> tuple[onnx.ModelProto, Batch, Any]:
    """A small network of scikit-learn on its own digits."""
    from skl2onnx import to_onnx  # pyright: ignore[reportMissingImports]
    from sklearn.datasets import load_digits  # pyright: ignore[reportMissingImports]
    from sklearn.neural_network import (  # pyright: ignore[reportMissingImports]
        MLPClassifier,
        MLPRegressor,
    )
    from sklearn.pipeline import make_pipeline  # pyright: ignore[reportMissingImports]
    from sklearn.preprocessing import StandardScaler  # pyright: ignore[reportMissingImports]

    from onward import loss

    x, y = (np.asarray(part) for part in load_digits(return_X_y=True))
    x, rows = x.astype(np.float32), {"X": x[:64].astype(np.float32)}
    shape: dict[str, Any] = {"hidden_layer_sizes": (32,), "max_iter": 20, "random_state": 0}
    if kind == "regressor":
        made = MLPRegressor(**shape).fit(x, y.astype(np.float32))
        target = y[:64, None].astype(np.float32)
        return to_onnx(made, x[:1]), {**rows, "target": target}, loss.mse("variable", "target")
    made = MLPClassifier(**shape)
    made = (make_pipeline(StandardScaler(), made) if kind == "pipeline" else made).fit(x, y)
    output = "output_probability"
    return to_onnx(made, x[:1]), {**rows, "target": y[:64].astype(np.int64)}, likely_of(output)


def by_example(name: str) -> tuple[onnx.ModelProto, Batch, Any]:
    """The model of an example program."""
    from onward import loss

    sys.path.insert(0, str(HERE.parents[1] / "examples"))
    example = importlib.import_module(name)
    if name == "jax_model":
        from flax import nnx  # pyright: ignore[reportMissingImports]

        model = example.exported(example.Classifier(nnx.Rngs(0)))
    else:
        model = example.exported(example.Classifier())
    return model, example.batch(np.random.default_rng(0)), loss.cross_entropy("logits")


NEW, OLD = ("torch", "transformers", "onnxscript"), ("torch", "transformers")
CASES: dict[str, Case] = {
    **{
        f"{kind}, {exporter}": Case("torch", needs, lambda k=kind, m=modern: by_torch(k, m))
        for kind in ("gpt2", "bert", "llama")
        for exporter, modern, needs in (("torch.export", True, NEW), ("TorchScript", False, OLD))
    },
    **{
        f"MLP, {kind}": Case("skl2onnx", ("skl2onnx", "sklearn"), lambda k=kind: by_sklearn(k))
        for kind in ("classifier", "regressor", "pipeline")
    },
    "tf.Module": Case(
        "tf2onnx", ("tf2onnx", "tensorflow"), lambda: by_example("tensorflow_module")
    ),
    "flax.nnx": Case("jax2onnx", ("jax2onnx", "flax"), lambda: by_example("jax_model")),
}
# what there is no row for, and why
ABSENT = {
    "optimum-onnx 0.1.0": "does not import beside transformers 5",
    "paddle2onnx 2.1.0": "needs PaddlePaddle, which the index lacks; files that it wrote are those "
    "of the rapid packages above",
}


def outcome(case: Case) -> dict[str, Any]:
    """What becomes of a model: a row of the page."""
    import onward
    from onward import TrainingSession
    from onward.errors import OnwardError

    warnings.simplefilter("ignore")
    row: dict[str, Any] = {"package": f"{case.package} {version(case.package)}", "opens": False}
    with contextlib.redirect_stdout(io.StringIO()):
        model, batch, made = case.make()
    try:
        session = TrainingSession(model, onward.optim.AdamW(lr=1e-3), made)
        row |= {"opens": True, "weights": len(session.state_dict())}
        names = [n for n, p in session.module.named_parameters() if p.requires_grad]
        judged = names[:: max(1, len(names) // JUDGED)][:JUDGED]
        report = session.verify(batch, weights=judged)
        slopes = [r for r in report.rows if "differences" in r.engine]
        row |= {"ok": report.ok, "gradients": [sum(r.ok for r in slopes), len(slopes)]}
        losses = [session.step(batch).loss for _ in range(STEPS)]
        row |= {"losses": [losses[0], losses[-1]], "trains": losses[-1] < losses[0]}
        row["why"] = "" if report.ok else str(report).partition("\n")[0]
    except OnwardError as error:
        row["why"] = str(error)
    return row


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--case", default="", help="one case, whose row is printed as JSON")
    given = parser.parse_args()
    if given.case:
        print(json.dumps(outcome(CASES[given.case])))
        return 0
    held: dict[str, Any] = json.loads(OUTCOMES.read_text()) if OUTCOMES.is_file() else {}
    for name, case in CASES.items():
        if given.only not in name or not all(map(importlib.util.find_spec, case.needs)):
            continue
        command = [sys.executable, __file__, "--case", name]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=SECONDS, check=True,
            cwd=OUTCOMES.parents[2] / "build",
        )  # fmt: skip
        held[name] = json.loads(done.stdout.strip().splitlines()[-1])
        print(name, held[name], flush=True)
    if given.write:
        ordered = {name: held[name] for name in CASES if name in held}
        OUTCOMES.write_text(json.dumps(ordered, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
