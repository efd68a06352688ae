"""Blocks: a free one is lent again, and whoever is bound to one that is gone is told."""

from __future__ import annotations

from collections.abc import Set

import torch

from onward.execute.blocks import Blocks


def test_a_block_moved_to_shared_memory_is_freed_once_nobody_holds_it() -> None:
    told: list[int] = []

    def dropped(addresses: Set[int]) -> None:
        told.extend(addresses)

    blocks = Blocks(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8), dropped)
    block = blocks.lend(64)
    address, held = block.base.data_ptr(), block.whole()
    held.fill_(7)
    held.share_memory_()
    del block
    other = blocks.lend(64)  # the moved block is held still, so that it is neither lent nor freed
    assert other.base.data_ptr() != address
    assert told == []
    assert held.tolist() == [7] * 64
    del held, other
    blocks.clear()
    assert told.count(address) == 1
    assert blocks.nbytes == 0


def test_a_block_that_nobody_holds_is_lent_again() -> None:
    blocks = Blocks(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))
    first = blocks.lend(64)
    address = first.base.data_ptr()
    del first
    assert blocks.lend(48).base.data_ptr() == address
