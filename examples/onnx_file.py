"""Trains an ONNX file that no framework wrote, with numpy alone: python examples/onnx_file.py"""

import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper, parser

import onward
from onward import loss

MODEL = """
<ir_version: 10, opset_import: ["" : 21]>
classifier (float[B, 8] x) => (float[B, 3] logits) {
    hidden = Gemm (x, w1, b1)
    active = Relu (hidden)
    logits = Gemm (active, w2, b2)
}
"""


def write(path: Path) -> None:
    """Writes a classifier of two layers with random weights."""
    model, rng = parser.parse_model(MODEL), np.random.default_rng(0)
    for name, shape in {"w1": (8, 32), "b1": (32,), "w2": (32, 3), "b2": (3,)}.items():
        array = rng.standard_normal(shape).astype(np.float32) / 8
        model.graph.initializer.append(numpy_helper.from_array(array, name))
    onnx.save(model, path)


def batch(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Points around three corners, and which corner each is of."""
    labels = rng.integers(0, 3, 64)
    x = rng.standard_normal((64, 8)) + 3 * np.eye(8)[labels]
    return {"x": x.astype(np.float32), "labels": labels}


def main() -> tuple[float, float]:
    """Returns the share of points that are told right before and after."""
    folder = Path(tempfile.mkdtemp())
    write(folder / "model.onnx")
    session = onward.TrainingSession(
        folder / "model.onnx", onward.optim.AdamW(lr=1e-2), loss.cross_entropy("logits")
    )
    rng = np.random.default_rng(1)
    test = batch(rng)

    def right() -> float:
        logits = session.predict({"x": test["x"]})["logits"]
        return float((logits.argmax(1) == test["labels"]).mean())

    before = right()
    for number in range(1, 301):
        result = session.step(batch(rng))
        if number % 60 == 0:
            print(f"step {number}: loss {result.loss:.3f}")
    after = right()
    session.export_onnx(folder / "trained.onnx")
    print(f"{before:.0%} right before, {after:.0%} after; written to {folder / 'trained.onnx'}")
    return before, after


if __name__ == "__main__":
    main()
