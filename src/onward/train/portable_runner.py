"""Trains with the ONNX files beside this one. It needs numpy and onnxruntime, nothing else.

    training = Training("folder")
    for ids in batches:  # training.json names what a batch holds
        print(training.step({"input_ids": ids, "labels": ids}, lr=1e-3)["loss"])
    training.save("trained.safetensors")

All that lasts is in `training.state`, arrays by name: `param.` and a parameter's path, and so on.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

Arrays = dict[str, np.ndarray]

DTYPES = {
    "F64": "<f8", "F32": "<f4", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "|i1", "U8": "|u1",
    "BOOL": "|b1",
}  # fmt: skip


class Training:
    """A training run. state: a file that `save` has written; by default the exported state.
    options: onnxruntime's, of each graph's session."""

    def __init__(
        self,
        folder: str | Path,
        state: str | Path | None = None,
        providers: Iterable[str] = ("CPUExecutionProvider",),
        options: onnxruntime.SessionOptions | None = None,
    ) -> None:
        self.folder, self.providers, self.options = Path(folder), list(providers), options
        self.about = json.loads((self.folder / "training.json").read_text())
        self.state = load(Path(state or self.folder / self.about["state"]))
        self.rates: dict[str, float] = dict(self.about["rates"])
        self.micro_steps = 0
        self.sessions: dict[str, onnxruntime.InferenceSession] = {}

    def step(self, batch: Mapping[str, Any], lr: float | None = None) -> Arrays:
        """Runs a micro-batch; the last of a window updates. Returns its loss and, with an update,
        `grad_norm` and `finite` where the files have them. lr: holds until another is given."""
        if lr is not None:
            self.rates.update(dict.fromkeys(self.about["lr"], lr))
        last = self.micro_steps == self.about["micro_batches"] - 1
        found = self.run("train" if last else "accumulate", batch)
        self.micro_steps = 0 if last else self.micro_steps + 1
        return found

    def evaluate(self, batch: Mapping[str, Any], outputs: Iterable[str] = ()) -> Arrays:
        """Returns the loss in evaluation mode, and the model's outputs that are named."""
        return self.run("eval", batch, outputs)

    def run(self, graph: str, batch: Mapping[str, Any], outputs: Iterable[str] = ()) -> Arrays:
        """Runs `train`, `accumulate` or `eval`, and puts what it gives back into the state."""
        about = self.about["graphs"][graph]
        if graph not in self.sessions:
            file = str(self.folder / about["file"])
            self.sessions[graph] = onnxruntime.InferenceSession(
                file, self.options, providers=self.providers
            )
        session = self.sessions[graph]
        given = {**self.state, **{name: np.array(rate) for name, rate in self.rates.items()}}
        given[self.about["seed"]["input"]] = self.seed(place=int(graph == "eval"))
        given.update(checked(batch, about["batch"], self.about["conditions"]))
        results = {key: about[key] for key in ("loss", "grad_norm", "finite") if about[key]}
        results.update({name: about["outputs"][name] for name in outputs})
        wanted = [*results.values(), *about["state"].values()]
        made = session.run(wanted, {item.name: given[item.name] for item in session.get_inputs()})
        found = {name: np.asarray(array) for name, array in zip(wanted, made, strict=True)}
        self.state.update({name: found[after] for name, after in about["state"].items()})
        return {key: found[name] for key, name in results.items()}

    def seed(self, place: int) -> np.ndarray:
        """The seed of dropout, from the numbers of updates and of windows left out."""
        numbers = (self.about["seed"]["key"], *map(int, self.state["window"]), place)
        digest = hashlib.blake2b(struct.pack("<4Q", *numbers), digest_size=8).digest()
        return np.array(struct.unpack("<2I", digest), np.int64)

    def save(self, path: str | Path) -> None:
        """Writes the state as safetensors. Raises ValueError within a window of micro-batches."""
        if self.micro_steps:
            raise ValueError("save after a step that updates")
        names = {dtype: name for name, dtype in DTYPES.items()}
        ordered = sorted(self.state.items(), key=lambda item: -item[1].itemsize)
        header: dict[str, Any] = {}
        end = 0
        for name, array in ordered:
            start, end = end, end + array.nbytes
            header[name] = {
                "dtype": names[array.dtype.str],
                "shape": list(array.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with Path(path).open("wb") as file:
            file.writelines([len(text).to_bytes(8, "little"), text])
            file.writelines(array.tobytes() for _, array in ordered)


def load(path: Path) -> Arrays:
    """Reads a safetensors file: the length of a header, the header in JSON, bytes of arrays."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)  # texts that other tools add
    arrays: Arrays = {}
    for name, item in header.items():
        count, start = math.prod(item["shape"]), 8 + length + item["data_offsets"][0]
        flat = np.fromfile(path, DTYPES[item["dtype"]], count, offset=start)
        arrays[name] = flat.reshape(item["shape"])
    return arrays


def checked(
    batch: Mapping[str, Any], leaves: Mapping[str, Any], conditions: Iterable[str]
) -> Arrays:
    """The arrays of a batch by input. Raises ValueError for sizes that the files are not for."""
    arrays = {name: np.asarray(batch[name], leaf["dtype"]) for name, leaf in leaves.items()}
    sizes: dict[str, int] = {}
    for name, leaf in leaves.items():
        have, want = arrays[name].shape, leaf["shape"]
        fits = len(have) == len(want)
        for n, size in zip(have, want, strict=False):
            factor, _, symbol = str(size).rpartition("*")  # 12, T, 8*T
            if symbol.isidentifier() and (not factor or factor.isdecimal()):
                count, rest = divmod(n, int(factor or 1))
                fits = fits and rest == 0 and sizes.setdefault(symbol, count) == count
            elif isinstance(size, int):
                fits = fits and n == size
        if not fits:
            raise ValueError(f"{name} has the shape {have}; the files are for {want}, {sizes}")
    for text in conditions:
        if not holds(text, sizes):
            raise ValueError(f"the files are for batches with {text}; this one has {sizes}")
    return {leaf["input"]: arrays[name] for name, leaf in leaves.items()}


def holds(condition: str, sizes: Mapping[str, int]) -> bool:
    """Whether sizes fulfil a condition, which is as trusted as this file beside it."""
    try:
        known = {"__builtins__": {}, "min": min, "max": max}
        return bool(eval(condition, known, dict(sizes)))
    except ZeroDivisionError:
        return False
