"""Call seeds: a seed for each accelerated call that draws random numbers, with no effect on other
draws.

In eager PyTorch the masks of a call follow from torch's random state, which the call then moves.
Here each call needs its own seed too. The seed must be restored with the random state
(`set_rng_state`, `fork_rng`, activation checkpointing), but other users of torch's generator (data,
samplers, initialisation) must draw as if there had been no call.

So calls are counted in bits of the state that no draw reads. torch's CPU generator is MT19937: 624
words, of which each draw returns the next. After the last word all are regenerated; of the first
word, regeneration uses only the highest bit. The other 31 bits are read only when that word is
returned, which happens in the draw that regenerates it. Between draws they have no effect
(docs/notes/0030-random-streams.md).
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b
from typing import Any, cast

import torch

from onward.forks import Lock
from onward.prepare.seed_stream import seed_words

# layout of `torch.get_rng_state()`, in words of 32 bits: seed (2), left, seeded, next (2), then
# MT's words, each in the lower half of 64 bits
_FIRST = 6  # the first word of MT
_READ = 2 * 16 + _FIRST  # the words hashed: 512 bits of MT's state, enough to tell states apart
_HIGHEST, _OTHERS = 0x80000000, 0x7FFFFFFF

_lock = Lock()


def call_seed() -> torch.Tensor:
    """The seed of one call, i64[2]: two words of 32 bits. Each call gets another one; `manual_seed`
    and restored random states repeat them."""
    if not _counts():  # torch has another generator: draw, as eager's dropout does
        return torch.randint(0, 2**32, (2,), dtype=torch.int64, device="cpu")
    with _lock:
        digest = _count(torch.default_generator)
    return seed_words(digest)


def _count(generator: torch.Generator) -> bytes:
    """Counts one call in the generator's state; returns a digest, 8 bytes, of the state before."""
    state = generator.get_state()
    words = memoryview(cast("Any", state.numpy())).cast("I")
    digest = blake2b(words[:_READ], digest_size=8).digest()
    first = words[_FIRST]
    words[_FIRST] = first & _HIGHEST | (first + 1) & _OTHERS
    generator.set_state(state)
    return digest


@cache
def _counts() -> bool:
    """Whether torch's generator stores the count and draws the same numbers with it as without."""
    plain, counted = torch.Generator(), torch.Generator()
    try:
        for drawn in (0, 1, 623, 624, 1000):  # around the places where words are regenerated
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
    """Draws f32[count], each number from 24 bits of one word."""
    return torch.rand(count, generator=generator, device="cpu", dtype=torch.float32)


__all__ = ["call_seed"]
