"""A batch for any model, made from the arguments of its forward, its sizes and its task."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from classes import Entry
from configs import FIRST_SPECIAL, IMAGE, LABELS, MELS, VOCABULARY

Batch = dict[str, Any]
MADE_UP = "none"
MORE = ("", "bare", "extras", "codebooks")

TARGETS: dict[str, tuple[str, ...]] = {
    "CAUSAL_LM": ("tokens",), "MASKED_LM": ("tokens",), "SEQ_TO_SEQ_CAUSAL_LM": ("tokens",),
    "IMAGE_TEXT_TO_TEXT": ("tokens",), "MULTIMODAL_LM": ("tokens",),
    "SPEECH_SEQ_2_SEQ": ("tokens",),
    "CTC": ("tokens",), "RNNT": ("tokens",), "TDT": ("tokens",), "TEXT_RECOGNITION": ("tokens",),
    "SEQUENCE_CLASSIFICATION": ("class",), "IMAGE_CLASSIFICATION": ("class",),
    "VIDEO_CLASSIFICATION": ("class",), "AUDIO_CLASSIFICATION": ("class",),
    "AUDIO_XVECTOR": ("class",), "MULTIPLE_CHOICE": ("class",),
    "NEXT_SENTENCE_PREDICTION": ("class",),
    "TOKEN_CLASSIFICATION": ("labels",), "QUESTION_ANSWERING": ("span",),
    "DOCUMENT_QUESTION_ANSWERING": ("span",), "TABLE_QUESTION_ANSWERING": ("labels",),
    "VISUAL_QUESTION_ANSWERING": ("scores", "class", "tokens"),
    "SEMANTIC_SEGMENTATION": ("map",), "IMAGE_SEGMENTATION": ("map", "picture"),
    "DEPTH_ESTIMATION": ("depth",), "IMAGE_TO_IMAGE": ("picture",),
    "AUDIO_FRAME_CLASSIFICATION": ("frames",), "OBJECT_DETECTION": ("boxes",),
    "UNIVERSAL_SEGMENTATION": ("masks",), "INSTANCE_SEGMENTATION": ("masks", "boxes"),
    "ZERO_SHOT_IMAGE_CLASSIFICATION": ("pairs",), "CAUSAL_IMAGE_MODELING": ("tokens",),
    "BASE": (),
}  # fmt: skip
GUESSES = ("tokens", "class", "labels", "pairs", "span", "map", "scores", "picture", "frames")


@dataclass(frozen=True)
class Form:
    """How the inputs lie. more: with what only some models ask for, or without masks of sounds.
    marks: tokens in each text that stand for an image or a sound."""

    target: str
    pixels: str = "image"
    audio: str = "wave"
    more: str = ""
    marks: int = 4


def forms(entry: Entry) -> Iterator[Form]:
    """The forms to try, the likeliest first; the last ones have a loss that is made up."""
    names = set(entry.parameters)
    targets = TARGETS.get(entry.task, GUESSES) if entry.own_loss else ()
    pixels = ("image", "video", "patches", "images") if _seen(names) else ("image",)
    if names & {"image_grid_thw", "image_grid_hw", "spatial_shapes"}:
        pixels = ("patches", "tiles", "rows", "image")
    audio = ("wave", "time_mel", "channel", "codes")
    if "input_features" in names:
        audio = ("time_mel", "mel_time", "wave", "channel_mel")
    audio = audio if names & {"input_features", "input_values", "audio_values"} else ("wave",)
    for target in (*targets, MADE_UP):
        for more in MORE:
            for p, a in itertools.product(pixels, audio):
                yield Form(target, p, a, more)


def _seen(names: set[str]) -> bool:
    return any("pixel" in n for n in names)


def field(config: Any, *names: str, default: Any = None) -> Any:
    """The first of these fields that the configuration or one inside it has."""
    for name in names:
        for part in _parts(config):
            value = getattr(part, name, None)
            if value is not None and not callable(value):
                return value
    return default


def _parts(config: Any) -> Iterator[Any]:
    yield config
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None:
            yield from _parts(part)


def _in(config: Any, section: str) -> Any:
    return next((getattr(config, n) for n in (section + "_config", section, f"{section}_encoder")
                 if getattr(config, n, None) is not None), config)  # fmt: skip


class Maker:
    """Makes batches of one form for one model."""

    def __init__(self, entry: Entry, config: Any, form: Form) -> None:
        self.entry, self.config, self.form = entry, config, form
        self.names = set(entry.parameters)

    def __call__(self, size: int, length: int) -> tuple[Batch, dict[str, Any]]:
        """Tensors, and arguments that are the same in every call."""
        self.size, self.length = size, length
        self.random = torch.Generator().manual_seed(1000 * size + length)
        self.batch: Batch = {}
        self.fixed: dict[str, Any] = {}
        self._text()
        self._image()
        self._sound()
        self._series()
        if self.form.target != MADE_UP:
            getattr(self, f"_{self.form.target}")()
        if self.form.more == "extras":
            self._extras()
        return self.batch, self.fixed

    def ints(self, high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.random)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random)

    def put(self, name: str, value: Any) -> None:
        if name in self.names:
            self.batch[name] = value

    # ---- inputs

    def _words(self, *shape: int) -> torch.Tensor:
        return self.ints(FIRST_SPECIAL, *shape, low=3)

    def _mask(self, *shape: int) -> torch.Tensor:
        mask = torch.ones(shape, dtype=torch.long)
        for row in range(1, shape[0]):
            mask[row, ..., shape[-1] - 1 - row % 3 :] = 0
        return mask

    def _text(self) -> None:
        size, length = self.size, self.length
        if "input_ids" not in self.names and "inputs" not in self.names:
            return
        if "input_ids" not in self.names:
            self.batch["inputs"] = self._words(size, length)
            return self.put("attention_mask", self._mask(size, length))
        shape = (size, 2, length) if self.entry.task == "MULTIPLE_CHOICE" else (size, length)
        books = 1
        if self.form.more == "codebooks":
            books = int(field(self.config, "num_codebooks", "num_channels"))
            if "decoder_input_ids" not in self.names:
                shape = (size * books, length)
        ids = self._words(*shape)
        mask = self._mask(*shape)
        marks = self._marks()
        if marks:
            head = [m for mark in marks for m in [mark] * self.form.marks]
            front = torch.tensor(head).expand(size, len(head))
            ids = torch.cat([ids[:, :1], front, ids[:, 1:]], 1)
            mask = torch.cat([torch.ones_like(front), mask], 1)
            types = torch.zeros_like(ids)
            types[:, 1 : 1 + len(head)] = 1
            if "mm_token_type_ids" in self.names:
                self.batch["mm_token_type_ids"] = types
            elif "token_type_ids" in self.names:
                self.batch["token_type_ids"] = types
        self.batch["input_ids"] = ids
        self.put("attention_mask", mask)
        if "bbox" in self.names:
            corner = self.ints(20, *ids.shape, 2)
            self.batch["bbox"] = torch.cat([corner, corner + 5], -1)
        encoder = field(self.config, "is_encoder_decoder", default=False)
        unlabelled = "labels" not in self.names
        alone = self.form.target in (MADE_UP, "pairs") and encoder
        if books > 1:
            self.put("decoder_input_ids", self._words(size, length - 2, books))
        elif unlabelled or alone:
            self.put("decoder_input_ids", self._words(size, length - 2))

    def _marks(self) -> list[int]:
        """The ids of the tokens that stand for what is seen and heard."""
        found = []
        seen = "pixel_values" in self.names or "flattened_patches" in self.names
        if seen:
            found.append(
                field(self.config, "image_token_id", "image_token_index", "media_token_id")
            )
        if self.names & {"input_features", "input_values", "audio_values"} and not (
            field(self.config, "is_encoder_decoder", default=False)
        ):
            found.append(field(self.config, "audio_token_id", "audio_token_index"))
        return [n for n in found if isinstance(n, int) and 0 <= n < VOCABULARY]

    def _image(self) -> None:
        if getattr(self.config, "vision_config", self.config) is None:
            return
        vision = _in(self.config, "vision")
        channels = field(vision, "num_channels", "in_channels", "in_chans", default=3)
        channels = channels if isinstance(channels, int) else 3
        side = field(vision, "image_size", "img_size", "input_size", default=IMAGE)
        high, wide = (side, side) if isinstance(side, int) else (*side, *side)[-2:]
        high, wide = min(high, 256), min(wide, 256)
        if self.entry.task == "TEXT_RECOGNITION" and not hasattr(vision, "image_size"):
            high, wide = 48, 96
        frames = field(vision, "num_frames", "frames_per_clip", default=2)
        patch = field(vision, "patch_size", default=8)
        patch = patch if isinstance(patch, int) else patch[-1]
        for name in ("pixel_values", "image", "images"):
            if name not in self.names:
                continue
            if self.form.pixels == "image":
                value = self.floats(self.size, channels, high, wide)
            elif self.form.pixels == "video":
                value = self.floats(self.size, int(frames), channels, high, wide)
            elif self.form.pixels == "images":
                tiles = 1 + bool(field(self.config, "image_grid_pinpoints"))
                value = self.floats(self.size, tiles, channels, high, wide)
            else:
                value = self._patches(vision, channels, patch)
            self.batch[name] = value
            if "high_res_pixel_values" in self.names:
                finer = field(_in(self.config, "high_res_vision"), "image_size", default=IMAGE)
                self.put("high_res_pixel_values", self.floats(self.size, channels, finer, finer))
            if self.form.pixels == "images" and "input_ids" in self.batch:
                seen = (*self.batch["input_ids"].shape, 1)
                self.put("image_attention_mask", torch.ones(seen, dtype=torch.long))
        if "pixel_values_videos" in self.names and "pixel_values" not in self.names:
            self.batch["pixel_values_videos"] = self.floats(
                self.size, int(frames), channels, high, wide
            )
        if "flattened_patches" in self.names:
            n = 6
            rows = torch.arange(n).view(1, n, 1).expand(self.size, n, 1).float()
            width = field(vision, "patch_embed_hidden_size", default=patch * patch * channels)
            self.batch["flattened_patches"] = torch.cat(
                [rows // 2 + 1, rows % 2 + 1, self.floats(self.size, n, width)], -1
            )
            self.put("attention_mask", torch.ones(self.size, n, dtype=torch.long))
        if self.form.pixels in ("patches", "images") or self.form.more == "extras":
            self.put("image_sizes", torch.tensor([[high, wide]] * self.size))

    def _patches(self, vision: Any, channels: int, patch: int) -> torch.Tensor:
        """Patches of all images, one after the other, and how many each has."""
        merge = int(field(vision, "spatial_merge_size", default=2))
        side = 2 * merge
        deep = field(vision, "temporal_patch_size", default=1)
        count = self.size * side * side
        grid = torch.tensor([[1, side, side]] * self.size)
        self.put("image_grid_thw", grid)
        self.put("image_merge_sizes", torch.full((self.size,), merge))
        self.put("image_grid_hw", grid[:, 1:].contiguous())
        width = channels * int(deep) * patch * patch
        if "spatial_shapes" in self.names:
            self.batch["spatial_shapes"] = grid[:, 1:].contiguous()
            self.put("pixel_attention_mask", torch.ones(self.size, side * side, dtype=torch.long))
            return self.floats(self.size, side * side, width)
        if self.form.pixels == "rows":
            return self.floats(self.size, side * side, width)
        if self.form.pixels == "tiles":
            return self.floats(count, channels, patch, patch)
        return self.floats(count, width)

    def _sound(self) -> None:
        if getattr(self.config, "audio_config", self.config) is None:
            return
        audio = _in(self.config, "audio")
        mels = field(audio, "num_mel_bins", "feature_projection_input_dim", "input_dim",
                     "feature_size", "input_feat_per_channel", "mel_dim", default=MELS)  # fmt: skip
        most = field(audio, "max_source_positions", "max_length", default=64)
        most = most if isinstance(most, int) else 64
        steps = 400 + 320 * (self.length + 6)
        frames = 4 * self.length if "decoder" not in str(self.names) else 2 * most
        task = self.entry.task
        shapes = {
            "wave": (self.size, steps),
            "channel": (self.size, 1, steps),
            "time_mel": (self.size, most if task == "AUDIO_CLASSIFICATION" else frames, mels),
            "mel_time": (self.size, mels, 2 * most),
            "codes": (self.size, 8, self.length),
            "channel_mel": (self.size, 1, frames, mels),
        }
        for name in ("input_features", "input_values", "audio_values", "waveform"):
            if name not in self.names:
                continue
            if self.form.audio == "codes":
                self.batch[name] = self.ints(8, *shapes["codes"])
                continue
            value = self.floats(*shapes[self.form.audio])
            self.batch[name] = value
            self.put("is_longer", torch.zeros(self.size, 1, dtype=torch.bool))
            if self.form.more == "bare" and field(self.config, "is_encoder_decoder"):
                for text in ("input_ids", "attention_mask"):
                    self.batch.pop(text, None)
            masked = "attention_mask" in self.names and "input_ids" not in self.names
            if masked and self.form.more != "bare":
                steps = value.shape[2 if self.form.audio == "mel_time" else 1]
                self.batch["attention_mask"] = self._mask(self.size, steps)
            for mask in ("feature_attention_mask", "input_features_mask"):
                steps = value.shape[2 if self.form.audio == "mel_time" else 1]
                self.put(mask, torch.ones(self.size, steps, dtype=torch.long))
        heard = self.names & {"input_features", "input_values"}
        if heard and self.form.target == MADE_UP:
            self.put("decoder_input_ids", self._words(self.size, self.length))

    def _series(self) -> None:
        if "past_values" not in self.names:
            return
        c = self.config
        context = field(c, "context_length", default=self.length)
        lags = field(c, "lags_sequence", default=[])
        past = context + max(lags, default=0)
        wide = field(c, "num_input_channels", default=0)
        channels = (wide,) if wide and not lags else ()
        self.batch["past_values"] = self.floats(self.size, past, *channels)
        ahead = field(c, "prediction_length", "horizon_length", default=4)
        times = field(c, "num_time_features", default=0)
        if lags:
            self.put("past_time_features", self.floats(self.size, past, times))
            self.put("future_time_features", self.floats(self.size, ahead, times))
            self.put("past_observed_mask", torch.ones(self.size, past))
        if self.form.target != MADE_UP:
            self.put("future_values", self.floats(self.size, ahead, *channels))
            wide = field(c, "num_targets", default=LABELS)
            kind = self.entry.task == "TIME_SERIES_CLASSIFICATION"
            target = self.ints(min(wide, 2), self.size) if kind else self.floats(self.size, wide)
            self.put("target_values", target)

    def _extras(self) -> None:
        """Inputs that only some models ask for."""
        b, shape = self.batch, (self.size, self.length)
        c = self.config
        self.put("states", self.floats(*shape, field(c, "state_dim", default=1)))
        self.put("actions", self.floats(*shape, field(c, "act_dim", default=1)))
        self.put("rewards", self.floats(*shape, 1))
        self.put("returns_to_go", self.floats(*shape, 1))
        self.put("timesteps", torch.arange(self.length).expand(shape).contiguous())
        if "returns_to_go" in self.names:
            self.put("attention_mask", self._mask(*shape))
        self.put(
            "spectrogram_labels",
            self.floats(self.size, 2 * self.length, field(c, "num_mel_bins", default=MELS)),
        )
        self.put("duration_labels", torch.full(shape, 2))
        self.put("pitch_labels", self.floats(*shape, 1))
        self.put("energy_labels", self.floats(*shape, 1))
        if "input_ids" in b:
            shape = tuple(b["input_ids"].shape)
            if "token_type_ids" not in b:
                self.put("token_type_ids", torch.zeros(shape, dtype=torch.long))
        vision = _in(self.config, "vision")
        side, patch = (
            field(vision, "image_size", default=IMAGE),
            field(vision, "patch_size", default=8),
        )
        if isinstance(side, int) and isinstance(patch, int):
            count = (side // patch) ** 2
            tubes = field(vision, "tubelet_size", default=None)
            if isinstance(tubes, int):
                count *= field(vision, "num_frames", "frames_per_clip", default=2) // tubes
            hidden = torch.zeros(self.size, count, dtype=torch.bool)
            hidden[:, ::2] = True
            self.put("bool_masked_pos", hidden)
            self.put("noise", self.floats(self.size, count))
        if "input_features" in b and "input_ids" in b:
            self.put(
                "audio_feature_lengths", torch.full((self.size,), b["input_features"].shape[-1])
            )
        if "pixel_values" in b:
            self.put("pixel_mask", torch.ones(self.size, *b["pixel_values"].shape[-2:]).long())
            self.put("query_pixel_values", b["pixel_values"].flip(0))
            self.put("prompt_pixel_values", b["pixel_values"].flip(0))
            self.put("prompt_masks", b["pixel_values"].flip(0))
        wide = int(field(self.config, "visual_embedding_dim", "visual_feat_dim", default=32))
        self.put("visual_embeds", self.floats(self.size, 3, wide))
        self.put("visual_feats", self.floats(self.size, 3, wide))
        self.put("visual_pos", self.floats(self.size, 3, 4))
        self.put("qformer_input_ids", self._words(self.size, 4))
        depth = field(self.config, "max_depth", default=50)
        self.put("xpath_tags_seq", self.ints(4, *shape, depth))
        self.put("xpath_subs_seq", self.ints(4, *shape, depth))
        self.put("entity_ids", self.ints(4, self.size, 2, low=1))
        self.put("entity_position_ids", self.ints(4, self.size, 2, 3))
        self.put("entity_attention_mask", torch.ones(self.size, 2, dtype=torch.long))
        self.put("decoder_input_values", self.floats(self.size, 8, MELS))
        self.put("speaker_embeddings", self.floats(self.size, 512))
        self.put("encoder_hidden_states", self.floats(self.size, 5, 32))

    # ---- targets

    def _tokens(self) -> None:
        """Labels of a language model; of another length where an encoder's inputs are."""
        ids, mask = self.batch.get("input_ids"), self.batch.get("attention_mask")
        apart = "decoder_input_ids" in self.names or "decoder_inputs_embeds" in self.names
        if self.form.more == "codebooks":
            books = int(field(self.config, "num_codebooks", "num_channels"))
            labels = self._words(self.size, self.length - 2 * apart, books)
        elif ids is None or (apart and "attention_mask" in self.names):
            labels = self._words(self.size, self.length - 2)
            labels[1:, -2:] = -100
            if self.entry.task in ("CTC", "RNNT", "TDT"):
                labels = self._words(self.size, 4) % 20 + 3
        else:
            labels = ids.clone()
            labels[ids >= FIRST_SPECIAL] = -100
            if mask is not None and mask.shape == labels.shape:
                labels[mask == 0] = -100
            if self.entry.task == "MASKED_LM":
                labels[:, ::3] = -100
        self.put("labels", labels)
        self.put("next_sentence_label", self.ints(2, self.size))
        self.put("sentence_order_label", self.ints(2, self.size))
        self.put("mc_labels", torch.zeros(self.size, dtype=torch.long))

    def _class(self) -> None:
        few = 2 if self.entry.task in ("MULTIPLE_CHOICE", "NEXT_SENTENCE_PREDICTION") else LABELS
        for name in ("labels", "next_sentence_label", "mc_labels", "target_values"):
            self.put(name, self.ints(few, self.size))

    def _labels(self) -> None:
        shape = tuple(self.batch["input_ids"].shape)
        labels = self.ints(2, *shape)
        if "attention_mask" in self.batch and self.entry.task != "TABLE_QUESTION_ANSWERING":
            labels[self.batch["attention_mask"] == 0] = -100
        self.put("labels", labels)

    def _span(self) -> None:
        self.put("start_positions", self.ints(3, self.size))
        self.put("end_positions", self.ints(3, self.size, low=2))

    def _pairs(self) -> None:
        if "return_loss" in self.names:
            self.fixed["return_loss"] = True

    def _scores(self) -> None:
        self.put("labels", torch.rand(self.size, LABELS, generator=self.random))

    def _pixel_size(self) -> tuple[int, int]:
        value = self.batch.get("pixel_values")
        return (IMAGE, IMAGE) if value is None else (int(value.shape[-2]), int(value.shape[-1]))

    def _map(self) -> None:
        self.put("labels", self.ints(LABELS, self.size, *self._pixel_size()))

    def _depth(self) -> None:
        self.put("labels", torch.rand(self.size, *self._pixel_size(), generator=self.random) + 1)

    def _picture(self) -> None:
        self.put("labels", self.floats(self.size, 3, *self._pixel_size()))

    def _frames(self) -> None:
        self.put("labels", self.ints(2, self.size, self.length + 6, LABELS))

    def _boxes(self) -> None:
        boxes = torch.tensor([[0.5, 0.5, 0.4, 0.4], [0.3, 0.3, 0.2, 0.2]])
        kinds = torch.tensor([0, 1])
        self.fixed["labels"] = [{"class_labels": kinds, "boxes": boxes}] * self.size

    def _masks(self) -> None:
        high, wide = self._pixel_size()
        self.fixed["mask_labels"] = [torch.ones(2, high, wide)] * self.size
        self.fixed["class_labels"] = [torch.tensor([0, 1])] * self.size


def with_marks(form: Form, marks: int) -> Form:
    return replace(form, marks=marks)
