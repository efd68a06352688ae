"""Files of tensors in the safetensors format, written tensor by tensor.

The library's writer joins all tensors in memory first; this one needs no copy on a CPU. Its reader
is used as it is. Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    tensors: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
    written: Callable[[Iterable[torch.Tensor]], None] | None = None,
) -> Iterator[Any]:
    """Yields the content of a safetensors file as buffers: one for each tensor, or for several that
    lie in memory as in the file. written: called with what was yielded, once the next is asked for.
    Raises CheckpointError for a tensor that the format does not have:
    sparse, quantized, on meta."""
    for name, tensor in tensors.items():
        if not _fits(tensor):
            raise CheckpointError(
                f"{name} is {tensor.dtype} of layout {tensor.layout} on {tensor.device.type}, "
                "which a safetensors file cannot hold"
            )
    ordered = _ordered(tensors)
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
    held: torch.Tensor | None = None  # u8[n], not yet yielded
    for name in ordered:
        tensor = tensors[name]
        if tensor.numel():
            bytes_ = tensor_bytes(tensor)
            if held is not None and _follows(bytes_, held):
                held = held.as_strided((held.numel() + bytes_.numel(),), (1,))
                continue
            if held is not None:
                yield held.numpy()
                if written is not None:
                    written([held])
            held = bytes_
    if held is not None:
        yield held.numpy()
        if written is not None:
            written([held])


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's elements as bytes u8[n] on the CPU, in row-major order whatever its layout in
    memory; a view of its memory where that is possible."""
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8)


def copied_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies tensors, so that they can be written while their owner changes them.

    The copies lie in the host's memory: those of a GPU are made behind what is queued there, and
    take none of its memory. Those of a CPU lie in one block as in the file, which is then written
    in few calls. Each call of a thread that writes takes the interpreter's lock, and training waits
    where the machine takes the processor from that thread meanwhile.
    """
    joined = [name for name in _ordered(tensors) if _joins(tensors[name])]
    nbytes = sum(tensors[name].nbytes for name in joined)
    block = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    copies: dict[str, torch.Tensor] = {}
    end = 0
    with torch.no_grad():
        for name in joined:
            tensor = tensors[name].detach()
            start, end = end, end + tensor.nbytes
            copies[name] = block[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    for name, tensor in tensors.items():
        if name not in copies:
            copy = _to_host(tensor.detach())
            copies[name] = copy.contiguous() if copy.layout == torch.strided else copy
    return {name: copies[name] for name in tensors}


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in the host's memory; elsewhere of a tensor that has no numbers."""
    return tensor.clone() if tensor.is_meta else tensor.to("cpu", copy=True)


def _ordered(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names in the order of the file: wide elements first, so that each tensor lies at a
    multiple of its element's size."""
    return sorted(tensors, key=lambda name: -tensors[name].element_size())


def _fits(tensor: torch.Tensor) -> bool:
    """Whether the format has tensors of this kind."""
    return tensor.layout == torch.strided and tensor.dtype in _NAMES and not tensor.is_meta


def _joins(tensor: torch.Tensor) -> bool:
    """Whether a copy can lie in a block of bytes with others."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return is_plain and _fits(tensor) and tensor.device.type == "cpu"


def _follows(second: torch.Tensor, first: torch.Tensor) -> bool:
    """Whether the bytes u8[m] lie behind the bytes u8[n] in the same memory."""
    return (
        second.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and second.storage_offset() == first.storage_offset() + first.numel()
    )


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


__all__ = ["copied_tensors", "read_tensors", "tensor_bytes", "tensor_chunks"]
