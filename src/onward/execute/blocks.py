"""Blocks: the memory of one forward, in use until its backward is done and its gradients are freed.

Tensors that leave a block share a storage made for it, whose reference count tells whether any of
them is still held. The launches' views use another storage over the same bytes, which does not
count. So a block is free again when nobody holds any of its tensors, whether autograd freed them
after the backward, an exception dropped them or `zero_grad` replaced them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

import torch

_CORE: Any = torch._C  # pyright: ignore[reportPrivateUsage]
# the number of recent requests remembered, and how much larger than these a free block may be
LATE, ROOM = 6, 1.2


class Block:
    """A block of bytes `u8[n]`. base: the tensor that launches use."""

    def __init__(self, base: torch.Tensor) -> None:
        self.base = base
        self._storage: Any = _CORE._construct_storage_from_data_pointer(
            base.data_ptr(), base.device, base.nbytes
        )
        # tensors of the block may outlive the Blocks that lent it
        self._storage.base = base
        self._binding: object = None
        self._patterns: list[torch.Tensor] = []  # windows made for that binding, never handed out

    @property
    def nbytes(self) -> int:
        return self.base.nbytes

    def forget(self) -> None:
        """Drops the value stored by `leave_in`."""
        self._storage.left = None

    @property
    def is_held(self) -> bool:
        """Whether the caller still holds a tensor of the block."""
        return _CORE._storage_Use_Count(self._storage._cdata) > 1 + len(self._patterns)

    @property
    def is_in_place(self) -> bool:
        """Whether the tensors handed out still lie in the block; `share_memory_` on any of them
        moves all."""
        return self._storage.data_ptr() == self.base.data_ptr()

    def whole(self) -> torch.Tensor:
        """The bytes of the block, `u8[n]`, as a tensor that holds the block."""
        return self.window(self.base)

    def window(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor over the same bytes as x, which is a view of `base`; it holds the block."""
        offset = (x.data_ptr() - self.base.data_ptr()) // x.itemsize if x.numel() else 0
        empty = torch.empty(0, dtype=x.dtype, device=x.device)
        return empty.set_(self._storage, offset, x.shape, x.stride())

    def windows(self, binding: object, at: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Makes the `window` of each tensor from cached ones, which is eight times as fast.
        binding: the cache is valid as long as this is the same object."""
        if self._binding is not binding:
            self._patterns = [self.window(x) for x in at()]
            self._binding = binding
        return [x.data for x in self._patterns]  # `.data`, so that each has its own version counter


def leave_in(content: torch.Tensor, value: Any) -> None:
    """Stores a value with the block that `content` lies in, until the block is lent again. The
    value must not refer to tensors of the block: such a cycle would never be freed."""
    content.untyped_storage().left = value  # type: ignore[attr-defined]


def left_in(content: torch.Tensor) -> Any:
    """The value stored with the block that `content` lies in; None where there is none."""
    return getattr(content.untyped_storage(), "left", None)


class Blocks:
    """The blocks of one Memory. make: allocates `u8[n]`. dropped: called with the addresses of
    blocks to be freed before another is allocated, so that whoever is bound to them lets go."""

    def __init__(
        self,
        make: Callable[[int], torch.Tensor],
        dropped: Callable[[Set[int]], None] = lambda _: None,
    ) -> None:
        self._make, self._dropped = make, dropped
        self._free: list[Block] = []
        self._lent: list[Block] = []
        self._late: list[int] = []  # bytes of recent requests

    def lend(self, nbytes: int) -> Block:
        """Returns a block of at least `nbytes` that no caller holds: the smallest free one, so that
        a loop gets the same one each time. If none is large enough, all free ones are released
        first. Free ones much larger than recent requests are released too."""
        self._sweep()
        self._late = [*self._late[1 - LATE :], nbytes]
        most = max(self._late) * ROOM
        if len(self._late) == LATE:
            self._drop([block for block in self._free if block.nbytes > most])
        found = next((block for block in self._free if block.nbytes >= nbytes), None)
        if found is None:
            self._drop(self._free)
            found = Block(self._make(max(nbytes, 1)))
        else:
            self._free.remove(found)
        self._lent.append(found)
        return found

    def holding(self, content: torch.Tensor) -> Block | None:
        """The lent block that `content` lies in; None where it is a copy."""
        at = content.data_ptr()
        return next((block for block in self._lent if block.base.data_ptr() == at), None)

    def clear(self) -> None:
        """Frees the memory of the blocks that are not lent."""
        self._sweep()
        self._drop(self._free)

    @property
    def nbytes(self) -> int:
        """The bytes of all blocks, lent and free."""
        return sum(block.nbytes for block in (*self._free, *self._lent))

    def _drop(self, blocks: Sequence[Block]) -> None:
        """Frees the memory of these blocks, which are not lent."""
        if blocks:
            gone = {block.base.data_ptr() for block in blocks}
            self._free = [block for block in self._free if block.base.data_ptr() not in gone]
            del blocks
            self._dropped(gone)

    def _sweep(self) -> None:
        """Moves blocks that nobody holds any more from lent to free, and frees those of them whose
        tensors were moved to shared memory."""
        back = [block for block in self._lent if not block.is_held]
        self._lent = [block for block in self._lent if block not in back]
        self._free += [block for block in back if block.is_in_place]
        self._free.sort(key=lambda block: (block.nbytes, block.base.data_ptr()))
        moved = {block.base.data_ptr() for block in back if not block.is_in_place}
        del back
        if moved:
            self._dropped(moved)
        for block in self._free:
            block.forget()


__all__ = ["Block", "Blocks", "leave_in", "left_in"]
