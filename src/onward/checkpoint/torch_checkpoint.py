"""States that `torch.distributed.checkpoint` has written, for a Trainer on any mesh.

`torch.distributed.checkpoint.load` fills a state that is there already, and passes over entries
that it lacks, as the moments of a new optimizer. What it fills here has every entry of the files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from onward.errors import CheckpointError, one_line


def empty_state(folder: str | Path) -> dict[str, Any]:
    """A state with the entries that `torch.distributed.checkpoint.save` has written into a folder:
    tensors without numbers on the CPU, and None; to be filled by its `load`. Both unpickle, so that
    the files have to be one's own. Raises CheckpointError where there are none."""
    # not with the package, since torch takes half a second to import it
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:  # any, since what is no pickle may raise anything
        raise CheckpointError(
            f"{folder} holds no state of torch.distributed.checkpoint ({one_line(str(error), 120)})"
            "; fix: name the folder that was saved as checkpoint_id"
        ) from error
    root: dict[str, Any] = {}
    for name, held in metadata.state_dict_metadata.items():
        path = (metadata.planner_data or {}).get(name, (name,))
        if isinstance(held, TensorStorageMetadata):
            _put(root, path, torch.empty(held.size, dtype=held.properties.dtype))
        else:
            _put(root, path, None)
    return root


def _put(root: dict[str, Any], path: tuple[str | int, ...], leaf: Any) -> None:
    """Puts a leaf into dicts, and lists where a part of its path is a number."""
    at: Any = root
    for key, following in zip(path, [*path[1:], None], strict=True):
        if isinstance(at, list):
            assert isinstance(key, int), "lists have numbers"
            at += [None] * (key + 1 - len(at))
            found = at[key]
        else:
            found = at.get(key)
        if following is None:
            at[key] = leaf
            return
        if found is None:
            found = at[key] = [] if isinstance(following, int) else {}
        at = found


__all__ = ["empty_state"]
