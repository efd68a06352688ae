"""Two ONNX models of others, fine-tuned on a small task each: scores before and after.

    python tests/onnx_models/fine_tuned.py [--wheels FOLDER] [--only fragments] [--write]

`fragments`: magika's model names the type of a file by its first and last bytes. Here it is to name
the type of 96 bytes out of the middle of a file, among those of an installation of Python;
validation is on packages that training has not seen.

`directions`: a model of rapidocr says whether a line of text is upside down. Here lines are small,
blurred and noisy; validation is on other text, in other fonts.

`--write` keeps the outcomes in `fine_tuned.json`, of which docs/onnx_files.md has a table.
"""

from __future__ import annotations

import argparse
import json
import time
import zipfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from converters import likely_of
from real_files import files_of

import onward
from onward import TrainingSession

HERE = Path(__file__).resolve().parent
OUTCOMES = HERE / "fine_tuned.json"
EACH = 96  # bytes of a fragment
ROWS = 32  # samples of a batch
PADDING, BEGIN, END = 256, 1024, 1024  # of magika's inputs
KINDS = {
    ".py": "python", ".h": "c", ".hpp": "cpp", ".js": "javascript", ".css": "css", ".json": "json",
    ".html": "html", ".rst": "rst", ".md": "markdown", ".svg": "svg", ".xml": "xml",
    ".toml": "toml", ".yaml": "yaml", ".yml": "yaml", ".csv": "csv", ".ts": "typescript",
}  # fmt: skip
FILES = 120  # at most, of a kind and of a side
HEIGHT, WIDTH = 48, 192  # of a line's picture
VALID = 16  # batches
# package, file, output, learning rate
TASKS = {
    "fragments": ("magika==1.0.3", "standard_v3_3/model.onnx", "target_label", 3e-4),
    "directions": (
        "rapidocr-onnxruntime==1.4.4", "ch_ppocr_mobile_v2.0_cls_infer.onnx",
        "save_infer_model/scale_0.tmp_1", 1e-3,
    ),
}  # fmt: skip

Batch = dict[str, np.ndarray]


# ---- fragments of files


def fragments(valid: bool, labels: list[str]) -> dict[int, list[np.ndarray]]:
    """Contents of files by the number of their kind, of packages that are for training or not."""
    root, found = Path(np.__file__).resolve().parents[1], dict[int, list[np.ndarray]]()
    for path in sorted(root.rglob("*")):
        label = KINDS.get(path.suffix)
        package = path.relative_to(root).parts[0]
        mine = sum(package.encode()) % 3 == 0
        if label is None or mine != valid or not path.is_file():
            continue
        held = found.setdefault(labels.index(label), [])
        if len(held) < FILES and path.stat().st_size > 3 * EACH:
            held.append(np.frombuffer(path.read_bytes()[: 1 << 16], np.uint8))
    return found


def fragment(content: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """magika's features of a part of a file, i32[2048]."""
    at = int(rng.integers(EACH, len(content) - EACH))
    part = np.frombuffer(content[at : at + EACH].tobytes().strip(), np.uint8).astype(np.int32)
    features = np.full(BEGIN + END, PADDING, np.int32)
    features[: len(part)] = part
    features[len(features) - len(part) :] = part
    return features


def fragment_batches(seed: int, valid: bool, labels: list[str]) -> Iterator[Batch]:
    rng, held = np.random.default_rng(seed), fragments(valid, labels)
    kinds = sorted(kind for kind, files in held.items() if len(files) >= 4)
    while True:
        target = rng.choice(kinds, ROWS)
        files = [held[k][rng.integers(len(held[k]))] for k in target]
        yield {"bytes": np.stack([fragment(x, rng) for x in files]), "target": target}


# ---- lines of text


def lines(valid: bool) -> list[str]:
    """Lines of this repository's pages; a third of the pages is for validation."""
    pages = sorted((HERE.parents[1] / "docs").rglob("*.md"))
    chosen = [page for i, page in enumerate(pages) if (i % 3 == 0) == valid]
    text = " ".join(page.read_text(encoding="utf-8") for page in chosen).split()
    return [" ".join(text[i : i + 4]) for i in range(0, len(text) - 4, 4)]


def picture(text: str, font: Any, turned: bool, rng: np.random.Generator) -> np.ndarray:
    """A line as a small, blurred and noisy picture, f32[3,48,192]."""
    from PIL import Image, ImageDraw, ImageFilter

    box = font.getbbox(text)
    image = Image.new("L", (box[2] + 8, box[3] + 8), 235)
    ImageDraw.Draw(image).text((4, 4), text, font=font, fill=int(rng.integers(20, 120)))
    if turned:
        image = image.rotate(180)
    small = int(rng.integers(7, 12))
    image = image.resize((max(1, image.width * small // image.height), small))
    image = image.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.2, 0.8))))
    width = min(WIDTH, max(1, image.width * HEIGHT // image.height))
    array = np.zeros((HEIGHT, WIDTH), np.float32)
    sized = np.asarray(image.resize((width, HEIGHT)), np.float32)
    noise = rng.normal(0, 25, sized.shape)
    array[:, :width] = (np.clip(sized + noise, 0, 255) / 255 - 0.5) / 0.5
    return np.repeat(array[None], 3, 0)


def line_batches(seed: int, valid: bool) -> Iterator[Batch]:
    import matplotlib
    from PIL import ImageFont

    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    names = ("DejaVuSerif", "DejaVuSansMono") if valid else ("DejaVuSans", "STIXGeneral", "cmr10")
    fonts = [ImageFont.truetype(folder / f"{name}.ttf", 32) for name in names]
    rng, texts = np.random.default_rng(seed), lines(valid)
    while True:
        target = rng.integers(0, 2, ROWS)
        made = [
            picture(texts[rng.integers(len(texts))], fonts[rng.integers(len(fonts))], bool(k), rng)
            for k in target
        ]
        yield {"x": np.stack(made), "target": target}


# ---- both


def share_right(session: TrainingSession, output: str, batches: list[Batch]) -> float:
    """The share of samples whose likeliest class is the right one."""
    right = [
        session.predict({k: x for k, x in batch.items() if k != "target"})[output].argmax(1)
        == batch["target"]
        for batch in batches
    ]
    return float(np.mean(right))


def fine_tuned(task: str, wheels: Path, updates: int) -> dict[str, Any]:
    """Trains a model; returns its scores before and after."""
    package, file, output, rate = TASKS[task]
    path = next(p for p in files_of(wheels, package) if str(p).endswith(file))
    session = TrainingSession(
        path, onward.optim.AdamW(lr=rate), likely_of(output), options={"max_grad_norm": 1.0},
        batch_norm=task == "directions",
    )  # fmt: skip
    if task == "fragments":
        labels = labels_of(wheels, package)
        train, valid = (fragment_batches(i, bool(i), labels) for i in (0, 1))
    else:
        train, valid = (line_batches(i, bool(i)) for i in (0, 1))
    held = list(islice(valid, VALID))
    before, begin = share_right(session, output, held), time.perf_counter()
    losses = [session.step(batch).loss for batch in islice(train, updates)]
    seconds = time.perf_counter() - begin
    after = share_right(session, output, held)
    return {
        "package": package, "file": file, "before": before, "after": after, "updates": updates,
        "rows": ROWS, "samples": VALID * ROWS, "rate": rate, "seconds": seconds,
        "losses": [float(np.mean(losses[:10])), float(np.mean(losses[-10:]))],
    }  # fmt: skip


def labels_of(wheels: Path, package: str) -> list[str]:
    """The names of magika's classes, which its wheel has beside the model."""
    wheel = next(wheels.glob(f"{package.partition('==')[0]}-*.whl"))
    with zipfile.ZipFile(wheel) as held:
        name = next(n for n in held.namelist() if n.endswith("config.min.json"))
        return json.loads(held.read(name))["target_labels_space"]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wheels", type=Path, default=Path("build/onnx-files"))
    parser.add_argument("--only", default="")
    parser.add_argument("--updates", type=int, default=300)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    found: dict[str, Any] = {}
    for task in TASKS:
        if given.only in task:
            found[task] = fine_tuned(task, given.wheels.resolve(), given.updates)
            print(task, found[task], flush=True)
    if given.write:
        held = json.loads(OUTCOMES.read_text()) if OUTCOMES.is_file() else {}
        OUTCOMES.write_text(json.dumps({**held, **found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
