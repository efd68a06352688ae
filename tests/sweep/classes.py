"""The model classes of transformers: what each is for, and of what kind its inputs are."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers as hf
import transformers.models.auto.modeling_auto as auto

# Transformers' own lists, the most telling task of a class first.
TASKS: tuple[str, ...] = (
    "CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION",
    "MASKED_IMAGE_MODELING", "SPEECH_SEQ_2_SEQ", "CTC", "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION", "IMAGE_TEXT_TO_TEXT", "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION", "TOKEN_CLASSIFICATION", "QUESTION_ANSWERING", "MULTIPLE_CHOICE",
    "NEXT_SENTENCE_PREDICTION", "SEMANTIC_SEGMENTATION", "IMAGE_SEGMENTATION", "OBJECT_DETECTION",
    "ZERO_SHOT_OBJECT_DETECTION", "INSTANCE_SEGMENTATION", "UNIVERSAL_SEGMENTATION",
    "DEPTH_ESTIMATION", "NORMAL_ESTIMATION", "POINTMAP_ESTIMATION", "POSE_ESTIMATION",
    "IMAGE_MATTING", "IMAGE_TO_IMAGE", "CAUSAL_IMAGE_MODELING", "KEYPOINT_DETECTION",
    "KEYPOINT_MATCHING", "AUDIO_FRAME_CLASSIFICATION", "AUDIO_XVECTOR", "RNNT", "TDT",
    "VISUAL_QUESTION_ANSWERING", "DOCUMENT_QUESTION_ANSWERING", "TABLE_QUESTION_ANSWERING",
    "TABLE_RECOGNITION", "TEXT_RECOGNITION", "TEXT_TO_SPECTROGRAM", "TEXT_TO_WAVEFORM",
    "TIME_SERIES_PREDICTION", "TIME_SERIES_CLASSIFICATION", "TIME_SERIES_REGRESSION", "DECISION",
    "RETRIEVAL", "MULTIMODAL_LM", "PRETRAINING",
)  # fmt: skip
# Arguments of a forward that make it return a loss.
ASKING = ("labels", "return_loss", "next_sentence_label", "start_positions", "future_values",
          "mc_labels", "sentence_order_label", "class_labels", "mask_labels", "target_values",
          "labels_ids", "label_ids", "loss_mask")  # fmt: skip
LIKE_TASK = {
    "ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForMaskedLM": "MASKED_LM",
    "ForSequenceClassification": "SEQUENCE_CLASSIFICATION",
    "ForTokenClassification": "TOKEN_CLASSIFICATION", "ForMultipleChoice": "MULTIPLE_CHOICE",
    "ForQuestionAnswering": "QUESTION_ANSWERING", "ForImageClassification": "IMAGE_CLASSIFICATION",
    "ForCTC": "CTC",
}  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A class: the folder it lives in, its name, its task, and whether it has a loss of its own."""

    family: str
    name: str
    task: str
    own_loss: bool

    @property
    def cls(self) -> type[Any]:
        folder = Path(hf.__file__).parent / "models" / self.family
        for file in sorted(folder.glob("modeling_*.py")):
            try:
                module = importlib.import_module(f"transformers.models.{self.family}.{file.stem}")
            except ImportError:
                continue
            if hasattr(module, self.name):
                return getattr(module, self.name)
        return getattr(hf, self.name)

    @property
    def parameters(self) -> list[str]:
        try:
            return list(inspect.signature(self.cls.forward).parameters)
        except ImportError:  # a package that the class asks for is missing
            return []

    @property
    def kind(self) -> str:
        """text, vision, speech, multimodal or series, by what the forward takes."""
        if self.task == "MODULE":
            return "vision" if self.family == "timm" else "text"
        names = set(self.parameters)
        seen = any("pixel" in n or n in ("images", "video", "query_images") for n in names)
        heard = bool(names & {"input_values", "input_features", "audio_values", "waveform"})
        heard |= "audio" in self.task.lower() or self.task in ("CTC", "TEXT_TO_SPECTROGRAM")
        read = "input_ids" in names or "bbox" in names
        if (seen and heard) or (read and (seen or heard)):
            return "multimodal"
        if seen:
            return "vision"
        if heard:
            return "speech"
        return "text" if read or "inputs" in names else "other"


def _files() -> Iterator[tuple[str, Path]]:
    for path in sorted((Path(hf.__file__).parent / "models").glob("*/modeling_*.py")):
        if path.parent.name in ("auto", "deprecated", "timm_backbone"):
            continue
        if not path.stem.startswith(("modeling_tf_", "modeling_flax_")):  # of older versions
            yield path.parent.name, path


def _forwards() -> dict[str, tuple[str, set[str] | None, bool]]:
    """Class name -> its family, the arguments of its own forward, and whether it is a model."""
    found: dict[str, tuple[str, set[str] | None, bool]] = {}
    for family, path in _files():
        known: dict[str, bool] = {}
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef):
                continue
            bases = [ast.unparse(b) for b in node.bases]
            model = any("PreTrainedModel" in b or known.get(b, False) for b in bases)
            known[node.name] = model
            forward = next((n for n in node.body if isinstance(n, ast.FunctionDef)
                            and n.name == "forward"), None)  # fmt: skip
            names = None
            if forward is not None:
                every = (*forward.args.posonlyargs, *forward.args.args, *forward.args.kwonlyargs)
                names = {a.arg for a in every}
            found.setdefault(node.name, (family, names, model))
    return found


def entries() -> list[Entry]:
    """Every class in one of the lists, every other class whose forward takes labels, and of a
    family with neither its plain model, whose loss is made up."""
    forwards = _forwards()
    tasks: dict[str, str] = {}
    for task in TASKS:
        # a version of transformers may have no such list
        for names in getattr(auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}).values():
            for name in (names,) if isinstance(names, str) else names:
                tasks.setdefault(name, task)
    for name, (_, names, model) in forwards.items():
        if model and names and names & set(ASKING) and "PreTrainedModel" not in name:
            like = next((t for end, t in LIKE_TASK.items() if name.endswith(end)), "OTHER")
            tasks.setdefault(name, like)
    found = []
    for name, task in tasks.items():
        if name not in forwards:
            continue
        family, names, _ = forwards[name]
        found.append(Entry(family, name, task, names is None or bool(names & set(ASKING))))
    have = {e.family for e in found}
    plain: dict[str, str] = {}
    for names in auto.MODEL_MAPPING_NAMES.values():
        for name in (names,) if isinstance(names, str) else names:
            if name in forwards and forwards[name][0] not in have:
                plain.setdefault(forwards[name][0], name)
    found += [Entry(family, name, "BASE", False) for family, name in plain.items()]
    order = {task: i for i, task in enumerate((*TASKS, "OTHER", "BASE"))}
    return sorted(found, key=lambda e: (e.family, not e.own_loss, order[e.task], e.name))


def import_all() -> dict[str, str]:
    """Imports the file of every family, once, and says which cannot be."""
    failed: dict[str, str] = {}
    for family, path in _files():
        try:
            importlib.import_module(f"transformers.models.{family}.{path.stem}")
        except Exception as error:
            failed[family] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return failed


if __name__ == "__main__":
    for entry in entries():
        print(entry.family, entry.name, entry.task, entry.own_loss)
    print(len(entries()), file=sys.stderr)
