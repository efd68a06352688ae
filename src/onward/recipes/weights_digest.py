"""The digest of a model's weights, by which a run knows its start weights again."""

from __future__ import annotations

import hashlib

import torch

from onward.checkpoint.tensor_file import tensor_bytes


def weights_sha256(model: torch.nn.Module) -> str:
    """The SHA-256 of the names and bytes of all weights and buffers."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor_bytes(tensor).numpy().data)
    return digest.hexdigest()


__all__ = ["weights_sha256"]
