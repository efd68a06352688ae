"""Texts of what is heard, by an encoder of spectrograms and a decoder, such as Whisper."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from onward.recipes.media_examples import words_in_morse
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.samples import Row, Samples
from onward.recipes.tables import Table
from onward.recipes.tasks.labelled import (
    MULTIPLE,
    padding_token,
    read_tables,
    split,
    tell_cut,
)
from onward.recipes.tasks.media import decoded_sound, file_bytes, file_of, samples_of_files
from onward.recipes.tasks.sequence_to_sequence import (
    EncoderDecoder,
    decoder_inputs,
    reference,
    target_frequencies,
    without_reference,
)
from onward.recipes.tasks.task import IGNORED_LABEL, Batch, Collate, Passage, TaskData

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel

    from onward.recipes.sound_processor import SoundProcessor

_WHISPERS_POSITIONS = 448
SOUNDS = ("audio", "sound", "file_name", "path", "file")
TEXTS = ("text", "sentence", "transcription", "transcript", "label")


class SpeechRecognition(EncoderDecoder):
    """A text of a sound."""

    name = "automatic-speech-recognition"
    about = "a text of what is heard"
    auto_class = "AutoModelForSpeechSeq2Seq"
    mapping = "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING"
    inputs = "speech"
    length_column = "labels"

    def read(self, config: FinetuneConfig) -> tuple[Table, ...]:
        """Reads tables of sounds and their texts, or words of the library as Morse code."""
        if config.train_file is None:
            return words_in_morse(config.corpus_bytes)
        return read_tables(config)

    def usual_target(self, positions: int | None) -> int:
        """The tokens that the decoder has positions for, since nothing of a text is cut; without a
        limit as many as Whisper's has."""
        return positions or _WHISPERS_POSITIONS

    def documents(self, sources: Sequence[Any], config: FinetuneConfig) -> Sequence[str]:
        """The texts of the sounds to train on."""
        table = sources[0]
        return table.texts(table.column(config.label_column, TEXTS, "label_column"))

    def encode(
        self,
        sources: Sequence[Table],
        processor: SoundProcessor,
        model_config: PreTrainedConfig,
        config: FinetuneConfig,
    ) -> TaskData:
        """The files of sounds, each of which is decoded once to see that it can be, and the tokens
        of its text, which are labels. Texts are cut where the options say so, which is told; else
        one that the decoder has too few positions for is refused."""
        tokenizer = padding_token(processor.tokenizer)
        most = self.longest_target(model_config, config)
        cuts = config.max_target_length is not None
        start: Any = getattr(model_config, "decoder_start_token_id", None)
        found: list[list[Row]] = []
        written: list[str] = []
        read: list[list[int]] = []
        for table in sources:
            sound = table.column(config.text_column, SOUNDS, "text_column")
            text = table.column(config.label_column, TEXTS, "label_column")
            texts = table.texts(text)
            how: dict[str, Any] = {"truncation": True, "max_length": most} if cuts else {}
            labels = tokenizer(text_target=texts, verbose=False, **how)["input_ids"]
            written += texts
            read += labels
            # the model puts the token of its start before the labels by itself
            labels = [ids[1:] if len(ids) > 1 and ids[0] == start else ids for ids in labels]
            _check_lengths(table, text, labels, most)
            files = [_sound_file(table, i, sound, processor) for i in range(len(table.rows))]
            found.append(
                [
                    {"file": file, "labels": ids, **reference(one, config)}
                    for file, ids, one in zip(files, labels, texts, strict=True)
                ]
            )
        if cuts:
            tell_cut(tokenizer, written, read, most, "targets", True)
        train, held = split(sources, found, config)
        train = without_reference(train)
        _check_features(spectrogram(train[0]["file"], processor), model_config)
        words = model_config.get_text_config().vocab_size
        baseline = target_frequencies(train, held, words)
        samples = samples_of_files(train), samples_of_files(held)
        counts = (int(part.lengths("labels").sum()) for part in samples)
        return TaskData(*samples, baseline, *counts)

    def draw(
        self, samples: Samples, processor: SoundProcessor, config: FinetuneConfig
    ) -> Callable[[Row], Row]:
        """Decodes a sample's sound, and makes a spectrogram of it as the model's processor does."""

        def decode(row: Row) -> Row:
            return {**row, "input_features": spectrogram(file_of(samples, row), processor)}

        return decode

    def collate(self, processor: SoundProcessor, config: FinetuneConfig) -> Collate:
        """Stacks spectrograms f32[B, bands, frames], and pads texts i64[B, T] by -100."""
        import torch

        tokenizer = padding_token(processor.tokenizer)

        def collate(rows: list[Row]) -> Batch:
            texts = tokenizer.pad(
                {"input_ids": [row["labels"] for row in rows]},
                return_tensors="pt",
                padding_side="right",
                pad_to_multiple_of=MULTIPLE,
                return_attention_mask=True,
            )
            labels = texts["input_ids"].masked_fill(texts["attention_mask"] == 0, IGNORED_LABEL)
            features = np.stack([row["input_features"] for row in rows])
            return {"input_features": torch.from_numpy(features), "labels": labels}

        return collate

    def tokens(self, batch: Mapping[str, torch.Tensor], model_config: PreTrainedConfig) -> int:
        """The tokens of the texts, without padding."""
        return self.counted(batch)

    def places(self, batch: Mapping[str, torch.Tensor], model_config: PreTrainedConfig) -> int:
        """The places of the texts, padding too."""
        return batch["labels"].numel()

    def shown(
        self, row: Row, processor: SoundProcessor, model_config: PreTrainedConfig
    ) -> list[Passage]:
        """The text, titled by the size of the spectrogram."""
        bands, frames = row["input_features"].shape
        return [Passage(f"sound of {bands} bands x {frames} frames", row["labels"])]

    def deployed(self, batch: Batch, model: PreTrainedModel) -> Batch:
        """Spectrograms, and the tokens of the text so far."""
        before = decoder_inputs(batch["labels"], model)
        return {"input_features": batch["input_features"], "decoder_input_ids": before}

    def prompts(self, rows: Sequence[Row], processor: SoundProcessor) -> Batch:
        """The spectrograms of the sounds."""
        import torch

        features = np.stack([row["input_features"] for row in rows])
        return {"input_features": torch.from_numpy(features)}

    def source(self, row: Row, processor: SoundProcessor) -> str:
        """The number of the sound among those that are evaluated on."""
        return f"sound {row['number']}"


def spectrogram(content: bytes, processor: SoundProcessor) -> NDArray[np.float32]:
    """The features of a sound's file, f32[bands, frames]."""
    extractor = processor.feature_extractor
    rate = extractor.sampling_rate
    made = extractor(decoded_sound(content, rate), sampling_rate=rate, return_tensors="np")
    return np.ascontiguousarray(made["input_features"][0], dtype=np.float32)


def _sound_file(table: Table, index: int, column: str, processor: SoundProcessor) -> bytes:
    content = file_bytes(table, index, column)
    try:
        sound = decoded_sound(content, processor.feature_extractor.sampling_rate)
    except ValueError as error:
        raise InputError(
            f"column {column!r} has no sound ({error})", table.where(index), "give a sound's file"
        ) from error
    extractor = processor.feature_extractor
    seconds = len(sound) / extractor.sampling_rate
    most = getattr(extractor, "chunk_length", None) or math.inf
    if not 0 < seconds <= most:
        raise InputError(
            f"column {column!r} has a sound of {seconds:.1f} s, and the model hears at most {most}",
            table.where(index),
            "cut it, or leave it out",
        )
    return content


def _check_lengths(table: Table, column: str, labels: Sequence[Sequence[int]], most: int) -> None:
    """Raises InputError for the first text with more tokens than the model writes."""
    for index, ids in enumerate(labels):
        if len(ids) > most:
            raise InputError(
                f"column {column!r} has a text of {len(ids)} tokens, and the model writes at most "
                f"{most}",
                table.where(index),
                f"leave it out, or cut all texts with --max_target_length {most}",
            )


def _check_features(features: NDArray[np.float32], model_config: PreTrainedConfig) -> None:
    """Raises InputError where the processor's spectrograms are not what the model takes."""
    bands = getattr(model_config, "num_mel_bins", len(features))
    positions = getattr(model_config, "max_source_positions", None)
    frames = 2 * positions if model_config.model_type == "whisper" and positions else None
    if len(features) != bands or (frames is not None and features.shape[1] != frames):
        raise InputError(
            f"the processor makes {list(features.shape)} spectrograms, the model takes "
            f"{[bands, frames or features.shape[1]]}",
            "in --model_name_or_path",
            "name a folder whose processor belongs to its model",
        )


__all__ = ["SpeechRecognition", "spectrogram"]
