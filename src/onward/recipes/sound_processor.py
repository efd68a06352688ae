"""SoundProcessor: what makes the inputs and the labels of a model that writes what it hears."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class SoundProcessor:
    """A feature extractor and a tokenizer.

    feature_extractor: makes spectrograms f32[bands, frames] of sound. tokenizer: of the texts.
    """

    feature_extractor: Any
    tokenizer: Any

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes both into a folder, in transformers' files."""
        self.feature_extractor.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


def tokenizer_of(processor: Any) -> Any:
    """The tokenizer among what makes a model's inputs: of sound, that of the texts."""
    return processor.tokenizer if isinstance(processor, SoundProcessor) else processor


__all__ = ["SoundProcessor", "tokenizer_of"]
