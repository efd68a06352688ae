"""Trains with an exported step in a process that has numpy and onnxruntime alone.

    losses, state = run(folder, batches, lr=1e-3)

As a program it reads the batches from `batches.npz` of a folder and writes `losses.json` and
`state.safetensors` beside them; torch, Onward and transformers cannot be imported there.
"""

from __future__ import annotations

import importlib.abc
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

BLOCKED = ("torch", "onward", "transformers", "safetensors", "onnx", "onnx_ir", "ml_dtypes")
Arrays = dict[str, np.ndarray]


class Blocked(importlib.abc.MetaPathFinder):
    """Refuses imports of the packages that a run must not need."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.partition(".")[0] in BLOCKED:
            raise ImportError(f"{fullname} is not here")


def run(
    folder: Path, batches: Sequence[Arrays], lr: float | None = None
) -> tuple[list[float], Path]:
    """Trains on these batches in another process; returns the losses of the steps, then that of an
    evaluation of the last batch, and the file of the state after them."""
    here = Path(tempfile.mkdtemp(dir=folder.parent))
    arrays: Any = {f"{i}/{name}": x for i, data in enumerate(batches) for name, x in data.items()}
    np.savez(here / "batches.npz", **arrays)
    command = [sys.executable, "-I", __file__, str(folder), str(here), json.dumps(lr)]
    made = subprocess.run(command, cwd=here, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    return json.loads((here / "losses.json").read_text()), here / "state.safetensors"


def main(folder: Path, here: Path, lr: float | None) -> None:
    sys.meta_path.insert(0, Blocked())
    sys.path.insert(0, str(folder))
    from run import Training  # type: ignore[attr-defined]

    assert not {name.partition(".")[0] for name in sys.modules} & {*BLOCKED}
    batches: dict[int, Arrays] = {}
    with np.load(here / "batches.npz") as held:
        for key in held.files:
            number, _, name = key.partition("/")
            batches.setdefault(int(number), {})[name] = held[key]
    training = Training(folder)
    losses = [float(training.step(batches[i], lr)["loss"]) for i in sorted(batches)]
    losses.append(float(training.evaluate(batches[max(batches)])["loss"]))
    training.save(here / "state.safetensors")
    (here / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3]))
