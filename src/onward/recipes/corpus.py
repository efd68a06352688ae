"""From text to tokens to blocks: text files, the built-in corpus, tokenising, the unigram
baseline."""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from onward.recipes.options import InputError
from onward.recipes.text_cache import kept_tokenizer, kept_tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Ids = NDArray[np.int32]
Blocks = TypeVar("Blocks", Ids, list[Ids])

END_OF_TEXT = "<|endoftext|>"
EVAL_ONE_IN = 20  # One in this many files, or of the last blocks, is held out for evaluation.
PIECE_CHARS = 1 << 20  # characters; longer documents are tokenised in pieces, on all cores
# Folders of others' packages, tests, applications, and generated tables (encodings).
SKIPPED_DIRS = frozenset(
    {
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "idlelib",
        "lib2to3",
        "turtledemo",
        "ensurepip",
        "encodings",
        "pydoc_data",
        "__pycache__",
        "__phello__",
    }
)


@dataclass(frozen=True)
class Text:
    """Documents and their source.

    source: a path, or the name of the built-in corpus. sha256: digest of the bytes read; of several
    files, digest of (relative path, length, bytes) for each, in reading order.
    """

    source: str
    documents: tuple[str, ...]
    sha256: str

    def __len__(self) -> int:
        """The number of characters in all documents."""
        return sum(map(len, self.documents))


def read_text_file(path: Path, option: str) -> Text:
    """Reads a UTF-8 file with any suffix (also WikiText's `.tokens`) as one document. Raises
    InputError where that is impossible."""
    try:
        data = path.read_bytes()
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise InputError(
            f"cannot read {str(path)!r} ({error.strerror})", f"in --{option}", "name a text file"
        ) from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{str(path)!r} is not UTF-8 text at byte {error.start}",
            f"in --{option}",
            "convert it to UTF-8",
        ) from error
    if not text.strip():
        raise InputError(f"{str(path)!r} has no text", f"in --{option}", "name a file with text")
    return Text(str(path), (text,), hashlib.sha256(data).hexdigest())


def python_library(max_bytes: int, root: Path | None = None) -> tuple[Text, Text]:
    """The built-in corpus: the library's Python sources, split by files into (train, eval)."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    texts: list[Text] = []
    for name, files in zip(("train", "eval"), library_sources(max_bytes, root), strict=True):
        digest = hashlib.sha256()
        for path, source in files:
            data = source.encode()
            digest.update(f"{path}\0{len(data)}\0".encode() + data)
        documents = tuple(source for _, source in files)
        texts.append(Text(f"python standard library ({name})", documents, digest.hexdigest()))
    return texts[0], texts[1]


def library_sources(max_bytes: int, root: Path) -> tuple[list[tuple[str, str]], ...]:
    """The (path, source) pairs of the library's files, for (train, eval). Raises InputError where
    one of the two has none.

    A hash of a file's relative path decides its order and its side of the split, so that an
    interpreter version has the same corpus on every machine.
    """
    ranked = sorted(
        (hashlib.sha256(relative.as_posix().encode()).hexdigest(), relative)
        for relative in _library_files(root)
    )
    sides: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
    total = 0
    for rank, relative in ranked:
        data = (root / relative).read_bytes()
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            continue
        if not text.strip() or total + len(data) > max_bytes:
            continue
        total += len(data)
        # the last digits: the first ones decide the order, which --corpus_bytes cuts off
        side = int(int(rank[-8:], 16) % EVAL_ONE_IN == 0)
        sides[side].append((relative.as_posix(), text))
    if not all(sides):
        raise InputError(
            f"the built-in corpus has {len(sides[0])} train and {len(sides[1])} eval files",
            f"in {root} with --corpus_bytes={max_bytes}",
            "raise --corpus_bytes, or name a --train_file",
        )
    return sides


def _library_files(root: Path) -> Iterator[Path]:
    """Relative paths of the Python sources that belong to the library itself."""
    for path in root.rglob("*.py"):
        relative = path.relative_to(root)
        # _sysconfigdata differs by build machine
        if SKIPPED_DIRS.isdisjoint(relative.parts) and not path.name.startswith("_sysconfigdata"):
            yield relative


def train_tokenizer(
    documents: Sequence[str], vocab_size: int, positions: int
) -> PreTrainedTokenizerBase:
    """Trains a byte-level BPE of at most `vocab_size` tokens, which `save_pretrained` can save."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(
        tokenizer_object=trained_bpe(tokenizer, vocab_size, [END_OF_TEXT], documents),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        unk_token=END_OF_TEXT,
        model_max_length=positions,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def trained_bpe(
    blank: Tokenizer, vocab_size: int, special_tokens: list[str], documents: Sequence[str]
) -> Tokenizer:
    """A blank byte-level tokenizer with a vocabulary of at most so many tokens of these texts,
    trained or kept from before."""
    from tokenizers import pre_tokenizers, trainers

    settings = {"vocab_size": vocab_size, "min_frequency": 2, "special_tokens": special_tokens}

    def train() -> None:
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(**settings, initial_alphabet=alphabet, show_progress=False)
        blank.train_from_iterator(pieces(documents), trainer)

    return kept_tokenizer(blank, settings, documents, train)


def pieces(documents: Sequence[str]) -> Iterator[str]:
    """The documents in pieces of about a megabyte, each cut at the end of a line."""
    for document in documents:
        start = 0
        while len(document) - start > PIECE_CHARS:
            end = document.rfind("\n", start, start + PIECE_CHARS) + 1 or start + PIECE_CHARS
            yield document[start:end]
            start = end
        yield document[start:]


def text_start(tokenizer: Any) -> list[int]:
    """The ids that a tokenizer puts before a text, such as Llama's `<s>`; none of GPT-2's."""
    whole = tokenizer("a")["input_ids"]
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    places = range(len(whole) - len(plain) + 1)
    at = next((i for i in places if whole[i : i + len(plain)] == plain), 0)
    return list(whole[:at])


def begun(ids: Sequence[int], start: Sequence[int]) -> list[int]:
    """The ids of a text behind those that a text starts with, unless they stand there already."""
    first = list(start)
    return list(ids) if list(ids[: len(first)]) == first else [*first, *ids]


def encode(tokenizer: Any, documents: Sequence[str], start: Sequence[int] = ()) -> Ids:
    """All documents as one sequence of ids `i32[tokens]`, separated by the end-of-text token.

    start: the ids that each document begins with. With one, a document that has its own start or
    end gets no second one, and a start that is the end-of-text token separates documents alone.
    """
    return kept_tokens(
        tokenizer, documents, lambda: _encoded(tokenizer, documents, start), start=start
    )


def encode_each(tokenizer: Any, documents: Sequence[str], start: Sequence[int] = ()) -> list[Ids]:
    """The ids of each document, with the end-of-text token behind them where there is one. start:
    as `encode` takes it."""

    def encoded() -> Ids:
        found = tokenizer(
            list(documents), add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        found = [[*begun(ids, start), *([] if start and ids[-1:] == end else end)] for ids in found]
        return np.array([*map(len, found), *(n for ids in found for n in ids)], dtype=np.int32)

    kept = kept_tokens(tokenizer, documents, encoded, apart=True, start=start)
    ends = np.cumsum(kept[: len(documents)])
    return np.split(kept[len(documents) :], ends[:-1])


def _encoded(tokenizer: Any, documents: Sequence[str], start: Sequence[int]) -> Ids:
    separator = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    first = list(start)
    separates = bool(first) and first[:1] == separator
    parts: list[Ids] = []
    for document in documents:
        ends = bool(first) and bool(parts) and parts[-1][-1:].tolist() == separator
        if parts and separator and not separates and not ends:
            parts.append(np.array(separator, dtype=np.int32))
        parts_of = list(pieces([document]))
        encoded = tokenizer(
            parts_of, add_special_tokens=False, return_attention_mask=False, verbose=False
        )["input_ids"]
        if first and list(encoded[0][: len(first)]) != first:
            lead = first[1:] if ends and separates else first
            parts.append(np.array(lead, dtype=np.int32))
        parts += [np.array(ids, dtype=np.int32) for ids in encoded]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def blocks(ids: Ids, block_size: int) -> Ids:
    """Consecutive blocks `i32[blocks, block_size]`; a shorter remainder is dropped."""
    count = len(ids) // block_size
    return ids[: count * block_size].reshape(count, block_size)


def split_blocks(all_blocks: Blocks) -> tuple[Blocks, Blocks]:
    """Splits the blocks of one text into (train, eval): the last twentieth, at least one, is held
    out."""
    held_out = max(1, len(all_blocks) // EVAL_ONE_IN)
    return all_blocks[:-held_out], all_blocks[-held_out:]


def unigram_perplexity(train_blocks: Ids, eval_blocks: Ids, vocab_size: int) -> float:
    """Perplexity of the eval tokens under the frequencies of the train tokens, with add-one
    smoothing.

    Only tokens that a model predicts count: all of a block except its first.
    """
    return math.exp(-log_frequencies(train_blocks, eval_blocks[:, 1:], vocab_size).mean())


def log_frequencies(known: Ids, tokens: Ids, vocab_size: int) -> NDArray[np.float64]:
    """The logarithm of the share that each of these tokens has among the known ones, f64 of the
    tokens' shape, with add-one smoothing over the vocabulary. The memory is that of the largest
    token, not of the vocabulary, which a hostile config.json makes as large as it likes."""
    counts = token_counts(known, int(tokens.max(initial=0)))
    return np.log(counts[tokens] + 1.0) - math.log(known.size + vocab_size)


def token_counts(tokens: Ids, largest: int = 0) -> NDArray[np.int64]:
    """How often each token occurs, i64 of those up to the largest, or to this one at least."""
    return np.bincount(tokens.reshape(-1), minlength=largest + 1)
