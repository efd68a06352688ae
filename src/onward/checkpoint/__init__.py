"""Checkpoints: a run's state as files in Hugging Face's layout, whole after a kill at any moment.

In: a `Checkpoint`, which is tensors and values by name. Out: its folder, written by `disk.py`, and
the same checkpoint read back after every byte was compared with its sha256.
Imports: errors alone; the Trainer says what its state is (train/checkpointing.py).
"""

from onward.checkpoint.background import BackgroundWriter, unwritten
from onward.checkpoint.checkpoint import Checkpoint, PackedCheckpoint, read_checkpoint
from onward.checkpoint.disk import StagedFiles, is_unpublished, remove, remove_unpublished
from onward.checkpoint.file_faults import FileFault, any_file_fault, tensor_file_fault
from onward.checkpoint.model_files import ModelState, config_files
from onward.checkpoint.rotation import (
    Found,
    checkpoints,
    damaged,
    folder_name,
    is_checkpoint,
    rotate,
    settle,
)
from onward.checkpoint.torch_checkpoint import empty_state

__all__ = [
    "BackgroundWriter",
    "Checkpoint",
    "FileFault",
    "Found",
    "ModelState",
    "PackedCheckpoint",
    "StagedFiles",
    "any_file_fault",
    "checkpoints",
    "config_files",
    "damaged",
    "empty_state",
    "folder_name",
    "is_checkpoint",
    "is_unpublished",
    "read_checkpoint",
    "remove",
    "remove_unpublished",
    "rotate",
    "settle",
    "tensor_file_fault",
    "unwritten",
]
