"""Converts models of an old opset by onnx's converter, in a process of its own.

The converter is a C++ program that takes what it reads at its word, so that a hostile file may end
it or have it fill the memory. The process has little memory and time, gets the model without the
numbers of its large tensors, and starts only for a model that is read no other way.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
from onnx import TensorProto

from onward.errors import OnwardError, one_line

SECONDS = 60  # that the process may take, its imports included
CHILD = Path(__file__).with_name("conversion_child.py")


def converted(model: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """The model in another opset; its external initializers stay as they are. Raises OnwardError
    where onnx does not convert it."""
    outside = {
        t.name: t for t in model.graph.initializer if t.data_location == TensorProto.EXTERNAL
    }
    sent = onnx.ModelProto()
    sent.CopyFrom(model)
    kept = [t for t in model.graph.initializer if t.name not in outside]
    del sent.graph.initializer[:]
    sent.graph.initializer.extend(kept)
    inputs = {info.name for info in model.graph.input}
    for name, tensor in outside.items():
        if name not in inputs:  # a tensor whose numbers are elsewhere is sent as an input
            info = onnx.helper.make_tensor_value_info(name, tensor.data_type, list(tensor.dims))
            sent.graph.input.append(info)
    answer = _answered(sent.SerializeToString(), opset)
    found = onnx.ModelProto()
    try:
        found.ParseFromString(answer)
    except Exception as error:  # whatever protobuf raises
        raise OnwardError("onnx's converter gives no model") from error
    left = [info for info in found.graph.input if info.name in inputs or info.name not in outside]
    del found.graph.input[:]
    found.graph.input.extend(left)
    found.graph.initializer.extend(outside.values())
    return found


def _answered(data: bytes, opset: int) -> bytes:
    """What the process makes of a model. Raises OnwardError with what it says."""
    command = [sys.executable, "-P", "-X", "utf8", str(CHILD), str(opset), str(SECONDS)]
    command += [path for path in sys.path if path]  # where onnx is found here
    try:
        done = subprocess.run(  # a file of this package
            command, input=data, capture_output=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise OnwardError(f"onnx's converter takes more than {SECONDS} s") from None
    except OSError as error:
        raise OnwardError(f"onnx's converter cannot be started: {error.strerror}") from error
    if done.returncode == 0:
        return done.stdout
    said = one_line(done.stderr.decode(errors="replace")[-2000:], 120)
    if done.returncode != 3:
        said = f"it ends with {done.returncode}"
    raise OnwardError(f"onnx's converter: {said}")


__all__ = ["converted"]
