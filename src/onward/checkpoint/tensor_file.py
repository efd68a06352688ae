"""Files of tensors in the safetensors format, written tensor by tensor.

The library's writer joins all tensors in memory first; this one needs no copy on a CPU. Its reader
is used as it is. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from onward.checkpoint.file_faults import tensor_file_fault
from onward.errors import CheckpointError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def tensor_chunks(
    tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None
) -> Iterator[Any]:
    """Yields the content of a safetensors file as buffers, one for each tensor. Raises
    CheckpointError for a tensor that the format does not have: sparse, quantized, on meta."""
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.dtype not in _NAMES or tensor.is_meta:
            raise CheckpointError(
                f"{name} is {tensor.dtype} of layout {tensor.layout} on {tensor.device.type}, "
                "which a safetensors file cannot hold"
            )
    # wide elements first, so that each tensor lies at a multiple of its element's size
    ordered = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name in ordered:
        tensor = tensors[name]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in ordered:
        tensor = tensors[name]
        if tensor.numel():
            flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy()


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Reads all tensors of a file into memory of their own. Raises CheckpointError, which says what
    the file is, where it is not of the format."""
    fault = tensor_file_fault(path)
    if fault is not None:
        raise CheckpointError(f"{path} {fault.what}; fix: {fault.fix}")
    try:
        return load_file(path)
    except (SafetensorError, OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error


__all__ = ["read_tensors", "tensor_chunks"]
