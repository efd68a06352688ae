"""Checkpoint: a training run at one moment, and its folder on the disk.

checkpoint-400/
    config.json, generation_config.json, model.safetensors    what `from_pretrained` reads
    optimizer.safetensors                                     tensors of the rest of the state
    trainer_state.json                                        the rest of the state
    manifest.json                                             sizes and sha256, written last
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from onward.checkpoint.disk import StagedFolder
from onward.checkpoint.manifest import Manifest, verify
from onward.checkpoint.model_files import WEIGHTS, ModelState
from onward.checkpoint.state_tree import decoded, encoded
from onward.checkpoint.tensor_file import copied_tensors, read_tensors, tensor_chunks
from onward.errors import CheckpointError

TENSORS = "optimizer.safetensors"
STATE = "trainer_state.json"
_LARGEST = 256 << 20  # bytes of trainer_state.json


@dataclass(frozen=True)
class Checkpoint:
    """All that a run needs to go on, and files that describe its model.

    model: weights and buffers. state: everything else, by owner: optimizer, accumulation window,
    loss scale, random states, what the user registered. facts: for the manifest: `run`, `updates`,
    `micro_steps` and versions. files: further text files by name.
    """

    model: ModelState
    state: Mapping[str, Any]
    facts: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict)

    def packed(self) -> PackedCheckpoint:
        """The checkpoint as files. Raises CheckpointError for what a file cannot hold; its tensors
        are still those of the run."""
        tensors: dict[str, torch.Tensor] = {}
        tree = {
            "global_step": self.facts["updates"],  # by the name that Hugging Face's trainers use
            "tied_weights": self.model.tied,
            "state": encoded(dict(self.state), "state", tensors),
            "model_extra_state": encoded(self.model.extra, "model", tensors),
        }
        text = json.dumps(tree, indent=1, allow_nan=False) + "\n"
        return PackedCheckpoint(
            {WEIGHTS: self.model.tensors, TENSORS: tensors},
            {**self.files, STATE: text},
            dict(self.facts),
        )


@dataclass(frozen=True)
class PackedCheckpoint:
    """A checkpoint as the content of its files.

    tensors: of each safetensors file, by key. texts: of each text file.
    """

    tensors: Mapping[str, Mapping[str, torch.Tensor]]
    texts: Mapping[str, str]
    facts: Mapping[str, Any]

    def copied(self) -> PackedCheckpoint:
        """A copy that shares no tensor with the run, so that the run can go on."""
        copies = {file: copied_tensors(own) for file, own in self.tensors.items()}
        return PackedCheckpoint(copies, self.texts, self.facts)

    def write(
        self, folder: Path, written: Callable[[Iterable[torch.Tensor]], None] | None = None
    ) -> None:
        """Writes the folder: it is there whole, or not at all. written: called with bytes
        of tensors that are in their file. Raises OSError."""
        with StagedFolder(folder) as staged:
            for name, own in self.tensors.items():
                staged.write(name, tensor_chunks(own, {"format": "pt"}, written))
            for name, text in self.texts.items():
                staged.write(name, [text.encode()])
            staged.commit(self.facts)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads a checkpoint after every byte of it was compared with its sha256. Raises
    CheckpointError for one that is damaged or not whole."""
    manifest = verify(folder)
    _require(folder, manifest, (WEIGHTS, TENSORS, STATE))
    if manifest.files[STATE].bytes > _LARGEST:
        raise CheckpointError(f"{folder / STATE} has more than {_LARGEST >> 20} MiB")
    try:
        tree = json.loads((folder / STATE).read_bytes())
        tied, state, extra = tree["tied_weights"], tree["state"], tree["model_extra_state"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{folder / STATE} is malformed: {error!r}") from error
    weights, tensors = read_tensors(folder / WEIGHTS), read_tensors(folder / TENSORS)
    if not isinstance(tied, dict) or not all(
        isinstance(kept, str) and kept in weights and key not in weights
        for key, kept in tied.items()
    ):
        raise CheckpointError(f"{folder / STATE} ties weights to others that are not there")
    try:
        state, extra = decoded(state, "state", tensors), decoded(extra, "model", tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / STATE}: {error}") from error
    if not isinstance(state, dict) or not isinstance(extra, dict) or {*weights, *tied} & {*extra}:
        raise CheckpointError(
            f"{folder / STATE} is malformed: its states are no dicts of their own"
        )
    return Checkpoint(ModelState(weights, tied, extra), state, manifest.facts)


def _require(folder: Path, manifest: Manifest, names: Iterable[str]) -> None:
    for name in names:
        if name not in manifest.files:
            raise CheckpointError(f"{folder} has no {name}")


__all__ = ["Checkpoint", "PackedCheckpoint", "read_checkpoint"]
