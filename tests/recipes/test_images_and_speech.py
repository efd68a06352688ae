"""Images and sounds: inputs are those of transformers' processors, files of many kinds are read,
bad ones are refused by row, and what a run leaves is read by transformers and onnxruntime."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image, ImageOps

from onward.cli import main
from onward.recipes.describe import Run, describe
from onward.recipes.loop import train
from onward.recipes.media_examples import RATE, morse, scanned_digits
from onward.recipes.options import FinetuneConfig, InputError
from onward.recipes.tasks.media import decoded_image, decoded_sound, wav_bytes

VIT = "hidden_size=32,num_hidden_layers=1,num_attention_heads=2,intermediate_size=48"
WHISPER = (
    "d_model=32,encoder_layers=1,decoder_layers=1,encoder_attention_heads=2,"
    "decoder_attention_heads=2,encoder_ffn_dim=48,decoder_ffn_dim=48"
)


def config_of(task: str, **options: Any) -> FinetuneConfig:
    given: dict[str, Any] = {
        "config_overrides": VIT if task == "image-classification" else WHISPER,
        "max_steps": 2, "per_device_train_batch_size": 2, "corpus_bytes": 700_000,
    }  # fmt: skip
    return FinetuneConfig(**{"task": task, **given, **options})


def image(number: int, size: tuple[int, int] = (20, 12)) -> Image.Image:
    pixels = np.random.default_rng(number).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def encoded(picture: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    picture.save(out, kind)
    return out.getvalue()


def sound(number: int, seconds: float = 0.5) -> np.ndarray[Any, Any]:
    drawn = np.random.default_rng(number).normal(0, 0.1, round(seconds * RATE))
    return drawn.astype(np.float32)


# ---- images


def images_below(folder: Path, kinds: tuple[str, ...] = ("PNG", "JPEG", "BMP")) -> str:
    for number in range(24):
        label, kind = "cat" if number % 3 else "dog", kinds[number % len(kinds)]
        (folder / label).mkdir(parents=True, exist_ok=True)
        path = folder / label / f"{number}.{kind.lower()}"
        path.write_bytes(encoded(image(number, (20 + number, 12)), kind))
    return str(folder)


def image_rows(folder: Path, count: int = 24) -> list[dict[str, Any]]:
    folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        (folder / f"{number}.png").write_bytes(encoded(image(number)))
        rows.append({"image": f"{number}.png", "label": number % 3})
    return rows


def jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_pixels_are_those_of_the_processor(tmp_path: Path) -> None:
    rows = image_rows(tmp_path)
    file = jsonl(tmp_path / "t.jsonl", rows)
    run = describe(config_of("image-classification", train_file=file, validation_file=file))
    batch = run.job.first_batch(run.job.train, 3)
    want = run.job.processor([image(number) for number in range(3)], return_tensors="pt")
    assert batch["pixel_values"].shape == (3, 3, 32, 32)
    assert torch.equal(batch["pixel_values"], want["pixel_values"])
    assert batch["labels"].tolist() == [0, 1, 2]
    assert run.job.task.tokens(batch, run.job.model_config) == 3 * 64


def test_folders_tables_and_datasets_have_the_same_images(tmp_path: Path) -> None:
    """Rows with paths, rows with bytes in parquet, and a saved dataset's images."""
    datasets = pytest.importorskip("datasets")
    import pyarrow
    import pyarrow.parquet

    rows = image_rows(tmp_path)
    contents = [(tmp_path / row["image"]).read_bytes() for row in rows]
    for number, (row, content) in enumerate(zip(rows, contents, strict=True)):
        named = tmp_path / "folder" / str(row["label"])
        named.mkdir(parents=True, exist_ok=True)
        (named / f"{number:02}.png").write_bytes(content)
    labels = [row["label"] for row in rows]
    held = [{"bytes": content, "path": None} for content in contents]
    table = pyarrow.table({"image": held, "label": labels})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    pyarrow.parquet.write_table(
        pyarrow.table({"image": contents, "label": labels}), tmp_path / "plain.parquet"
    )
    made = datasets.Dataset.from_dict({"image": held, "label": [str(n) for n in labels]})
    made = made.cast_column("image", datasets.Image())
    made.cast_column("label", datasets.ClassLabel(names=["0", "1", "2"])).save_to_disk(
        str(tmp_path / "saved")
    )
    lines = ["image,label", *(f"{row['image']},{row['label']}" for row in rows)]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    found: list[list[tuple[bytes, int]]] = []
    for name in ("t.csv", "t.parquet", "plain.parquet", "saved", "folder"):
        file = str(tmp_path / name)
        run = describe(config_of("image-classification", train_file=file, validation_file=file))
        drawn = run.job.drawn(run.job.train)
        found.append(
            sorted((drawn[i]["pixel_values"].tobytes(), drawn[i]["labels"]) for i in range(24))
        )
        assert run.job.model_config.id2label == {0: "0", 1: "1", 2: "2"}
    assert all(each == found[0] for each in found[1:])


def test_kinds_of_files_and_modes_are_read(tmp_path: Path) -> None:
    folder = Path(images_below(tmp_path / "kinds"))
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(folder / "cat" / "grey.png")
    image(1).convert("RGBA").save(folder / "cat" / "alpha.png")
    image(2).convert("P").save(folder / "dog" / "palette.gif")
    (folder / "dog" / "notes.txt").write_text("no image")
    run = describe(config_of("image-classification", train_file=str(folder)))
    assert len(run.job.train) + len(run.job.eval) == 27
    assert run.job.model_config.id2label == {0: "cat", 1: "dog"}


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_images_are_turned_as_their_camera_says(kind: str) -> None:
    for orientation in range(10):
        exif = Image.Exif()
        exif[0x0112] = orientation
        out = io.BytesIO()
        image(1).save(out, kind, exif=exif)
        want = ImageOps.exif_transpose(Image.open(io.BytesIO(out.getvalue()))).convert("RGB")
        found = decoded_image(out.getvalue())
        assert found.mode == "RGB" and found.size == want.size
        assert found.tobytes() == want.tobytes(), orientation
        if kind == "PNG":
            assert found.size == ((12, 20) if orientation in (5, 6, 7, 8) else (20, 12))
    out = io.BytesIO()
    image(1).save(out, "PNG", exif=b"Exif\0\0nothing that can be read")
    assert decoded_image(out.getvalue()).tobytes() == image(1).tobytes()


def test_hidden_files_of_a_folder_are_left_out(tmp_path: Path) -> None:
    folder = Path(images_below(tmp_path / "kinds"))
    for name in (".ipynb_checkpoints/0.png", "cat/.ipynb_checkpoints/0-checkpoint.png",
                 "__MACOSX/cat/0.png", "dog/._0.png", ".DS_Store/x.png"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encoded(image(1)))
    run = describe(config_of("image-classification", train_file=str(folder)))
    assert len(run.job.train) + len(run.job.eval) == 24
    assert run.job.model_config.id2label == {0: "cat", 1: "dog"}
    hidden = tmp_path / ".hidden"
    folder.rename(hidden)  # a folder that is named is read
    run = describe(config_of("image-classification", train_file=str(hidden)))
    assert len(run.job.train) + len(run.job.eval) == 24


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"image": "absent.png", "label": 1}, "cannot read 'absent.png'"),
        ({"image": "broken.png", "label": 1}, "column 'image' has no image"),
        ({"image": "short.jpg", "label": 1}, "column 'image' has no image"),
        ({"image": 7, "label": 1}, "column 'image' has 7"),
        ({"image": "", "label": 1}, "column 'image' has ''"),
        ({"image": "0.png", "label": ""}, "column 'label' is empty"),
        ({"image": "0.png", "label": None}, "column 'label' has nothing"),
        ({"image": ".", "label": 1}, "cannot read '.'"),
        ({"image": "a\0b", "label": 1}, "cannot read"),
    ],
)
def test_bad_rows_are_named(row: dict[str, Any], said: str, tmp_path: Path) -> None:
    rows = image_rows(tmp_path, 6)
    (tmp_path / "broken.png").write_bytes(b"GIF89a but not really")
    (tmp_path / "short.jpg").write_bytes(encoded(image(3, (64, 64)), "JPEG")[:700])
    file = jsonl(tmp_path / "t.jsonl", [*rows, row])
    with pytest.raises(InputError) as raised:
        describe(config_of("image-classification", train_file=file))
    assert said in str(raised.value) and "t.jsonl, line 7" in str(raised.value)


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(image(0)))  # of no label
    with pytest.raises(InputError, match="has no folder with"):
        describe(config_of("image-classification", train_file=str(tmp_path)))


@pytest.mark.parametrize("option", [{"vocab_size": 300}, {"block_size": 64}, {"doc_stride": 4}])
def test_images_have_no_tokens(option: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="task image-classification has no"):
        describe(config_of("image-classification", **option))


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    found = scanned_digits()
    want: Any = load_digits()
    assert [row["label"] for row in found.rows] == [str(label) for label in want.target]
    for row, scan in zip(found.rows[:50], want.images, strict=False):
        pixels = np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])), dtype=np.float64)
        assert np.abs(pixels * 16 / 255 - scan).max() < 0.04


def test_a_loaded_model_keeps_its_processor_and_its_labels(tmp_path: Path) -> None:
    """What a run leaves is loaded by transformers, and trained further."""
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    out = tmp_path / "run"
    words = ["finetune", "--task=image-classification", "--max_steps=2", "--config_overrides"]
    words += [f"{VIT},image_size=16", "--max_train_samples=40", "--max_eval_samples=12"]
    assert main([*words, "--save_strategy=no", "--output_dir", str(out)]) == 0
    model: Any = AutoModelForImageClassification.from_pretrained(out).eval()
    processor: Any = AutoImageProcessor.from_pretrained(out)
    digits = scanned_digits().rows[:5]
    pictures = [Image.open(io.BytesIO(row["image"]["bytes"])).convert("RGB") for row in digits]
    pixels = processor(pictures, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (5, 3, 16, 16)
    with torch.no_grad():
        want = model(pixel_values=pixels).logits.numpy()
    session = onnxruntime.InferenceSession(str(out / "model.onnx"))
    names = [each.name for each in session.get_inputs()]
    assert names == ["pixel_values"]
    found: Any = session.run(["logits"], {"pixel_values": pixels.numpy()})[0]
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-5)
    run = describe(
        FinetuneConfig(
            task="image-classification",
            model_name_or_path=str(out),
            max_steps=1,
            max_train_samples=20,
            max_eval_samples=5,
        )
    )
    assert run.job.model_config.id2label == {n: str(n) for n in range(10)}
    assert run.job.first_batch(run.job.train, 2)["pixel_values"].shape == (2, 3, 16, 16)


def test_a_processor_of_another_size_is_refused(tmp_path: Path) -> None:
    run = describe(config_of("image-classification", max_train_samples=8, max_eval_samples=4))
    run.job.model_config.save_pretrained(tmp_path)
    made = run.job.processor
    made.size = {"height": 24, "width": 24}
    made.save_pretrained(tmp_path)
    from onward.recipes.start_model import build_model

    build_model(run.job.config, run.job.model_config).save_pretrained(tmp_path)
    given = FinetuneConfig(task="image-classification", model_name_or_path=str(tmp_path))
    with pytest.raises(InputError, match=r"makes \[24, 24\] pixels, the model takes \[32, 32\]"):
        describe(given)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(InputError, match="cannot load an image processor"):
        describe(given)


def test_a_model_that_interpolates_its_positions_takes_other_sizes(tmp_path: Path) -> None:
    """DINOv2 as it is published: other positions in its configuration than its processor makes."""
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 2,
        "image_size": 32, "patch_size": 4,
    }  # fmt: skip
    model: Any = Dinov2Model(Dinov2Config(**sizes))
    model.save_pretrained(tmp_path / "model")
    side = {"height": 16, "width": 16}
    BitImageProcessor(size={"shortest_edge": 16}, crop_size=side).save_pretrained(
        tmp_path / "model"
    )
    run = describe(
        FinetuneConfig(
            task="image-classification", model_name_or_path=str(tmp_path / "model"), max_steps=2,
            max_train_samples=8, max_eval_samples=4, per_device_train_batch_size=4,
        )
    )  # fmt: skip
    batch = run.job.first_batch(run.job.train, 2)
    assert batch["pixel_values"].shape == (2, 3, 16, 16)
    assert run.train_tokens == 8 * 16
    found = [train(run.job, e, tmp_path, save_model=False) for e in ("onward", "torch")]
    np.testing.assert_allclose(found[0].step_losses, found[1].step_losses, rtol=1e-4)


# ---- sounds


def speech_run(
    tmp_path: Path, files: dict[str, bytes], texts: list[str] | None = None, **options: Any
) -> Run:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    said = texts or [f"word {i}" for i in range(len(files))]
    rows = [{"audio": name, "text": text} for name, text in zip(files, said, strict=True)]
    file = jsonl(tmp_path / "t.jsonl", rows)
    return describe(
        config_of("automatic-speech-recognition", train_file=file, validation_file=file, **options)
    )


def test_features_and_labels_are_those_of_transformers(tmp_path: Path) -> None:
    files = {f"{n}.wav": wav_bytes(sound(n, 0.3 + 0.2 * n), RATE) for n in range(6)}
    run = speech_run(tmp_path, files)
    batch = run.job.first_batch(run.job.train, 4)
    extractor = run.job.processor.feature_extractor
    heard = [decoded_sound(content, RATE) for content in list(files.values())[:4]]
    want = extractor(heard, sampling_rate=RATE, return_tensors="pt")["input_features"]
    assert batch["input_features"].shape == (4, 80, 200)
    torch.testing.assert_close(batch["input_features"], want, rtol=1e-4, atol=1e-4)
    texts = [f"word {n}" for n in range(4)]
    for row, text in zip(batch["labels"], texts, strict=True):
        ids = row[row != -100].tolist()
        assert run.tokenizer.decode(ids, skip_special_tokens=True) == text
        assert ids[-1] == run.tokenizer.eos_token_id
    model: Any = train(run.job, "torch", tmp_path, save_model=False)
    assert np.isfinite(model.eval_loss)


def test_a_start_token_is_not_learnt_twice(tmp_path: Path) -> None:
    """A tokenizer that begins texts with the decoder's start has it removed from the labels, which
    the model shifts by itself."""
    from tokenizers.processors import TemplateProcessing

    files = {f"{n}.wav": wav_bytes(sound(n), RATE) for n in range(6)}
    run = speech_run(tmp_path, files)
    tokenizer = run.tokenizer
    end = tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="</s> $A </s>", special_tokens=[("</s>", end)]
    )
    again = run.job.task.encode(
        run.sources, run.job.processor, run.job.model_config, run.job.config
    )
    assert [row["labels"] for row in again.train] == [row["labels"] for row in run.job.train]


def test_sounds_of_other_files_and_rates(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    soxr = pytest.importorskip("soxr")
    one = sound(1, 1.0)
    for kind, subtype in (("FLAC", "PCM_24"), ("WAV", "FLOAT"), ("OGG", "VORBIS")):
        out = io.BytesIO()
        soundfile.write(out, one, RATE, format=kind, subtype=subtype)
        found = decoded_sound(out.getvalue(), RATE)
        assert len(found) == len(one)
        if kind != "OGG":  # which loses something
            np.testing.assert_allclose(found, one, atol=1e-6)
    at_8000 = soxr.resample(one, RATE, 8000)
    found = decoded_sound(wav_bytes(at_8000, 8000), RATE)
    np.testing.assert_allclose(found, soxr.resample(at_8000, 8000, RATE), atol=1e-3)
    stereo = io.BytesIO()
    with wave.open(stereo, "wb") as made:
        made.setnchannels(2)
        made.setsampwidth(2)
        made.setframerate(RATE)
        pairs = np.stack([one, np.zeros_like(one)], axis=1) * 32767
        made.writeframes(pairs.astype("<i2").tobytes())
    np.testing.assert_allclose(decoded_sound(stereo.getvalue(), RATE), one / 2, atol=1e-4)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"no sound at all", "has no sound"),
        (wav_bytes(sound(0, 0.0), RATE), "a sound of 0.0 s"),
        (wav_bytes(sound(0, 2.5), RATE), "a sound of 2.5 s, and the model hears at most 2"),
    ],
)
def test_bad_sounds_are_named(content: bytes, said: str, tmp_path: Path) -> None:
    files = {f"{n}.wav": wav_bytes(sound(n), RATE) for n in range(3)}
    with pytest.raises(InputError) as raised:
        speech_run(tmp_path, {**files, "bad.wav": content})
    assert said in str(raised.value) and "t.jsonl, line 4" in str(raised.value)


def test_more_tokens_than_the_decoder_has_are_refused(tmp_path: Path) -> None:
    files = {f"{n}.wav": wav_bytes(sound(n), RATE) for n in range(3)}
    with pytest.raises(InputError, match="max_target_length 65 is over the model's 64 positions"):
        speech_run(tmp_path, files, max_target_length=65)


def test_no_text_is_cut_unless_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {f"{n}.wav": wav_bytes(sound(n), RATE) for n in range(3)}
    texts = ["a", "word " * 99, "b"]
    told = r"'text' has a text of \d+ tokens, and the model writes at most 64, in .*line 2; fix: "
    with pytest.raises(InputError, match=told):
        speech_run(tmp_path, files, texts)
    run = speech_run(tmp_path, files, texts, max_target_length=64, predict_with_generate=True)
    assert "note: 2 of 6 targets are cut at 64 tokens\n" in capsys.readouterr().err
    assert [len(row["labels"]) for row in run.job.train][1] == 64
    assert [run.job.task.target(row) for row in run.job.eval] == texts
    assert [int(ids.max()) < 300 for ids in run.job.eval.token_ids()] == [True]


@pytest.mark.parametrize("is_multilingual", [False, True])
def test_texts_of_any_length_fit_behind_what_whisper_begins_with(
    is_multilingual: bool, tmp_path: Path
) -> None:
    """With the options' defaults, where the decoder has 64 positions."""
    from onward.recipes.generated_texts import generated_texts
    from onward.recipes.start_model import build_model

    files = {f"{n}.wav": wav_bytes(sound(n), RATE) for n in range(3)}
    job = speech_run(tmp_path, files, predict_with_generate=True).job
    model: Any = build_model(job.config, job.model_config)
    if is_multilingual:  # as the generation_config.json of OpenAI's
        given = model.generation_config
        given.is_multilingual, given.language, given.task = True, "en", "transcribe"
        given.lang_to_id, given.task_to_id = {"<|en|>": 5}, {"transcribe": 6, "translate": 7}
        given.no_timestamps_token_id = 8
    model.generation_config.eos_token_id = None  # nothing ends a text but its length
    texts = generated_texts(model, job.task, job.eval, job.processor, job.config)
    features = job.first_batch(job.eval, 3)["input_features"]
    most = 60 if is_multilingual else 63
    made = model.generate(input_features=features, max_new_tokens=most, do_sample=False)
    want = [job.tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in made]
    assert sorted(text["prediction"] for text in texts) == sorted(want)
    with pytest.raises(ValueError, match="max_target_positions"):
        model.generate(input_features=features, max_new_tokens=most + 1, do_sample=False)


def test_morse_is_the_recommendations() -> None:
    assert "".join("#" if on else "." for on in morse("sos")) == "#.#.#...###.###.###...#.#.#"
    assert len(morse("paris")) + 7 == 50  # the word that its speed is counted in, with its pause


def test_a_run_writes_what_generate_does(tmp_path: Path) -> None:
    """Texts and error rates are those of transformers and jiwer, and onnxruntime's logits those of
    the model."""
    jiwer = pytest.importorskip("jiwer")
    from transformers import AutoFeatureExtractor, AutoModelForSpeechSeq2Seq, AutoTokenizer

    out = tmp_path / "run"
    words = ["finetune", "--task=automatic-speech-recognition", "--max_steps=3"]
    words += ["--config_overrides", WHISPER, "--max_train_samples=40", "--max_eval_samples=6"]
    words += ["--predict_with_generate", "--max_target_length=8", "--save_strategy=no"]
    assert main([*words, "--corpus_bytes=700000", "--output_dir", str(out)]) == 0
    results = json.loads((out / "eval_results.json").read_text())
    texts = [json.loads(x) for x in (out / "generated_predictions.jsonl").read_text().splitlines()]
    told, true = [t["prediction"] for t in texts], [t["target"] for t in texts]
    assert results["wer"] == pytest.approx(100 * jiwer.wer(true, told))
    assert results["cer"] == pytest.approx(100 * jiwer.cer(true, told))
    config = config_of(
        "automatic-speech-recognition", max_train_samples=40, max_eval_samples=6,
    )  # fmt: skip
    job = describe(config).job
    rows = [job.drawn(job.eval)[i] for i in range(6)]
    features = torch.from_numpy(np.stack([row["input_features"] for row in rows]))
    model: Any = AutoModelForSpeechSeq2Seq.from_pretrained(out).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(out)
    assert AutoFeatureExtractor.from_pretrained(out).chunk_length == 2
    written = model.generate(input_features=features, max_new_tokens=8, do_sample=False)
    want = [tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in written]
    assert told == want
    inputs = job.task.deployed(job.collate()(rows), model)
    session = onnxruntime.InferenceSession(str(out / "model.onnx"))
    assert {each.name for each in session.get_inputs()} == set(inputs)
    found: Any = session.run(["logits"], {name: t.numpy() for name, t in inputs.items()})[0]
    with torch.no_grad():
        logits = model(**inputs).logits.numpy()
        labels = job.collate()(rows)["labels"]
        by_labels = model(input_features=features, labels=labels).logits.numpy()
    np.testing.assert_allclose(found, logits, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(logits, by_labels, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["vit-tiny", "whisper-tiny"])
def test_presets_are_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", name, "--batch_size", "2"]) == 0
    assert "captured" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["image-classification", "automatic-speech-recognition"])
def test_data_shows_samples(task: str, capsys: pytest.CaptureFixture[str]) -> None:
    overrides = VIT if task == "image-classification" else WHISPER
    words = ["data", "--task", task, "--config_overrides", overrides, "--samples", "1"]
    assert main([*words, "--corpus_bytes", "700000"]) == 0
    said = capsys.readouterr().out
    assert "baseline" in said
    assert ("channels of 32 x 32 pixels" in said) == (task == "image-classification")
    assert ("vocabulary" in said) == (task != "image-classification")
