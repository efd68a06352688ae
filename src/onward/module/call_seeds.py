"""Call seeds: a seed for each accelerated call that draws, from a random state that no draw sees.

In eager PyTorch the masks of a call follow from torch's random state, and the next call has others
because the first has moved it. Here a call has to have its own seed too, and one that comes back
with the state (`set_rng_state`, `fork_rng`, activation checkpointing), while whatever else draws
from torch's generator (data, samplers, initialisation) draws as if the call had not been.

So calls are counted in a place of the state that no draw reads. torch's CPU generator is MT19937:
624 words, of which a draw gives out the next. Behind the last the words are made anew, and of the
first word only the highest bit goes into that; its other 31 are read when the word itself is given
out, which is in the same draw that made it. Between draws these 31 bits decide nothing
(docs/notes/0030-random-streams.md).
"""

from __future__ import annotations

import threading
from functools import cache
from hashlib import blake2b
from typing import Any, cast

import torch

from onward.prepare.seed_stream import seed_words

# the layout of `torch.get_rng_state()`, in words of 32 bits: seed (2), left, seeded, next (2), and
# then MT's words, each in the lower half of 64 bits
_FIRST = 6  # MT's first
_READ = 2 * 16 + _FIRST  # enough to tell any two states that a run comes by: 512 bits of MT's
_HIGHEST, _OTHERS = 0x80000000, 0x7FFFFFFF

_lock = threading.Lock()


def call_seed() -> torch.Tensor:
    """The seed of one call, i64[2]: two words of 32 bits. Each has its own, which `manual_seed`
    and a restored random state repeat."""
    if not _counts():  # a torch whose generator is another: as eager's dropout does
        return torch.randint(0, 2**32, (2,), dtype=torch.int64, device="cpu")
    with _lock:
        digest = _count(torch.default_generator)
    return seed_words(digest)


def _count(generator: torch.Generator) -> bytes:
    """A digest of the generator's state, 8 bytes; the state has then counted one more."""
    state = generator.get_state()
    words = memoryview(cast("Any", state.numpy())).cast("I")
    digest = blake2b(words[:_READ], digest_size=8).digest()
    first = words[_FIRST]
    words[_FIRST] = first & _HIGHEST | (first + 1) & _OTHERS
    generator.set_state(state)
    return digest


@cache
def _counts() -> bool:
    """Whether torch's generator keeps the count, and draws what it would draw without."""
    plain, counted = torch.Generator(), torch.Generator()
    try:
        for drawn in (0, 1, 623, 624, 1000):  # about where the words are made anew
            for generator in (plain, counted):
                generator.manual_seed(1)
                _draw(generator, drawn)
            start = counted.get_state()
            digests = {_count(counted) for _ in range(3)}
            kept = counted.get_state()
            if len(digests) != 3 or torch.equal(kept, start):
                return False
            counted.set_state(kept)
            if not torch.equal(counted.get_state(), kept):
                return False
            if not torch.equal(_draw(plain, 1300), _draw(counted, 1300)):
                return False
    except (RuntimeError, TypeError, ValueError, IndexError):
        return False
    return True


def _draw(generator: torch.Generator, count: int) -> torch.Tensor:
    """Numbers of 24 bits, each of one word, f32[count]."""
    return torch.rand(count, generator=generator, device="cpu", dtype=torch.float32)


__all__ = ["call_seed"]
