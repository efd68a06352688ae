"""Tokens of texts, and tokenizers that were trained on them, kept on disk beside the graphs of
steps, so that a second run on a text begins sooner."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from onward import cache_files
from onward.environment import environment
from onward.graph.archive import ArchiveError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

_LIBRARIES = ("tokenizers", "transformers")


def kept_tokens(
    tokenizer: Any,
    documents: Sequence[str],
    encode: Callable[[], NDArray[np.int32]],
    apart: bool = False,
    start: Sequence[int] = (),
) -> NDArray[np.int32]:
    """The tokens i32[tokens] that `encode` makes of texts, or those in the cache. apart: whether
    the length of each text stands before the tokens. start: the tokens that each text begins with.
    Only tokens of the tokenizers library are cached."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not environment().graph_cache:
        return encode()
    about = [type(tokenizer).__name__, tokenizer.eos_token_id, backend.to_str()]
    about += [list(start)] if start else []
    key = _key("lengths-and-tokens" if apart else "tokens", about, documents)
    found = cache_files.read(key, lambda k, body: _array(_own(k, body)))
    if found is None:
        found = encode()
        tokens = found
        cache_files.write(key, lambda: key.encode() + tokens.astype("<i4").tobytes())
    return found


def kept_tokenizer(
    blank: Tokenizer,
    settings: Mapping[str, Any],
    documents: Sequence[str],
    train: Callable[[], None],
) -> Tokenizer:
    """The tokenizer that `train` makes of a blank one, or that which was kept. settings: of its
    training."""
    if not environment().graph_cache:
        train()
        return blank
    key = _key("tokenizer", [blank.to_str(), dict(settings)], documents)
    found = cache_files.read(key, lambda k, body: _tokenizer(_own(k, body)))
    if found is None:
        train()
        found = blank
        cache_files.write(key, lambda: (key + blank.to_str()).encode())
    return found


def _key(kind: str, about: Sequence[Any], documents: Sequence[str]) -> str:
    """The name of what is kept, by all that decides it."""
    digest = hashlib.sha256(json.dumps([*about, *map(version, _LIBRARIES)]).encode())
    for text in documents:
        data = text.encode("utf-8", "surrogatepass")
        digest.update(f"\0{len(data)}\0".encode() + data)
    return f"{kind}-{digest.hexdigest()}"


def _own(key: str, body: bytes) -> bytes:
    """What was kept under a key, which stands before it."""
    if not body.startswith(key.encode()):
        raise ArchiveError("of another text")
    return body[len(key) :]


def _array(body: bytes) -> NDArray[np.int32]:
    if len(body) % 4:
        raise ArchiveError("no tokens")
    return np.frombuffer(body, dtype="<i4").astype(np.int32)


def _tokenizer(body: bytes) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_str(body.decode())
    except Exception as error:  # the tokenizers library has none of its own
        raise ArchiveError(f"no tokenizer: {error}") from error


__all__ = ["kept_tokenizer", "kept_tokens"]
