"""Faults of what reads files that a stranger may have made: checkpoints, weights, model folders."""

from __future__ import annotations

from fault import Fault

DAMAGE = ("checkpoint/test_damage.py",)
PICKLES = ("checkpoint/test_hostile_pickles.py",)
WEIGHTS = ("recipes/test_broken_weights.py",)

FILES_FAULTS: tuple[Fault, ...] = (
    Fault(
        "files: white space in a manifest is not seen", "checkpoint/manifest.py",
        "if data != manifest_bytes(files, facts):", "if False:", DAMAGE,
    ),
    Fault(
        "files: sums of files are not compared", "checkpoint/manifest.py",
        "if digest.hexdigest() != record.sha256:", "if False:", DAMAGE,
    ),
    Fault(
        "files: links of a checkpoint are followed", "checkpoint/manifest.py",
        "os.O_RDONLY | os.O_NOFOLLOW | ", "os.O_RDONLY | ", DAMAGE,
    ),
    Fault(
        "files: a checkpoint without a manifest is passed over without a word",
        "checkpoint/rotation.py",
        "os.path.lexists(folder / MANIFEST) or (folder / TENSORS).exists()",
        "os.path.lexists(folder / MANIFEST)", DAMAGE,
    ),
    Fault(
        "files: a tensor may be there twice", "checkpoint/file_faults.py",
        "if times > 1:", "if times > 2:", WEIGHTS,
    ),
    Fault(
        "files: what is cut and what is longer are mixed up", "checkpoint/file_faults.py",
        "if there < end else", "if there > end else", WEIGHTS,
    ),
    Fault(
        "files: links out of a model's folder are followed", "recipes/model_folder.py",
        "if not any(target.is_relative_to(place) for place in inside):", "if False:", WEIGHTS,
    ),
    Fault(
        "files: a shard may lie elsewhere", "recipes/model_folder.py",
        "if Path(name).name != name or", "if", WEIGHTS,
    ),
    Fault(
        "files: a shard may be a pickle", "recipes/model_folder.py",
        "if not isinstance(name, str) or not name.endswith(ending):",
        "if not isinstance(name, str):", WEIGHTS,
    ),
    Fault(
        "files: config.json may name a pickle", "recipes/model_folder.py",
        'not str(named).endswith((".safetensors", INDEX[5:])):', "not named:", WEIGHTS,
    ),
    Fault(
        "files: integers become weights", "recipes/model_folder.py",
        'if kind[0] in "IUBC" and', 'if kind[0] in "" and', WEIGHTS,
    ),
    Fault(
        "files: other shapes start at random", "recipes/start_model.py",
        'model, sorted(info["mismatched_keys"]))', "model, [])", WEIGHTS,
    ),
    Fault(
        "files: code is read from pickles", "recipes/start_model.py",
        "weights_only=True,", "weights_only=False,", PICKLES,
    ),
    Fault(
        "files: a pickle needs no leave", "recipes/model_folder.py",
        "if pickles and not allow_pickle:", "if False:", PICKLES,
    ),
)  # fmt: skip
