"""Names in prose that look like names of ours and are not, each with its reason (`prose.py`)."""

from __future__ import annotations

from typing import NamedTuple


class Allowed(NamedTuple):
    """Names that look like ours and are not: a pattern of them, of the pages where, and why."""

    check: str
    names: str
    where: str
    reason: str


ALLOWED = (
    Allowed("paths", r".*", r"docs/models\.md", "generated: files of transformers"),
    Allowed("paths", r"benchmarks/kernels\.py", r"docs/log\.md", "a name that was changed"),
    Allowed("paths", r"wikitext-2\..*", r"docs/log\.md", "files of a data set"),
    Allowed("paths", r"(text|bert|train|module)\.(txt|py)", r"docs/.*", "a user's file"),
    Allowed("paths", r"(file\.txt|batches\.json)", r"examples/.*", "a user's file"),
    Allowed("paths", r"(result\.json|script\.py)", r"tests/outsiders/.*", "a call's arguments"),
    Allowed("command_line", r"--(nproc-per-node|max-restarts)", r".*", "switches of torchrun"),
    Allowed("command_line", r"--.*", r"docs/places\.md", "switches of docker, kubectl, az"),
    Allowed("command_line", r"--inplace", r"docs/notebook\.md", "a switch of jupyter execute"),
    Allowed("command_line", r"--lr", r"docs/explain\.md", "an option of the user's script"),
    Allowed("rewrite_passes", r"pass squared_relu", r"examples/plugin/.*", "the plugin's pass"),
    Allowed("dotted", r"onward\.plugins", r".*", "the group of entry points"),
    Allowed(
        "instances", r"trainer\.onward_trainer", r"docs/integrations\.md", "the drop-in Trainer's"
    ),
    Allowed("identifiers", r".*", r"docs/migration/.*", "names of the package that one comes from"),
    Allowed("identifiers", r"(Wav2Vec2|Hubert)ForCTC", r"CHANGELOG\.md", "transformers"),
    Allowed(
        "identifiers",
        r"pthread_atfork|OMP_WAIT_POLICY|GOMP_SPINCOUNT",
        r"docs/notes/0045.*",
        "of the C library and of OpenMP's runtime",
    ),
    Allowed("identifiers", r"ORTModule", r"README\.md", "ONNX Runtime"),
    Allowed("identifiers", r"cse", r"CHANGELOG\.md", "a name that was changed"),
    Allowed(
        "identifiers",
        r"DataCollatorWithFlattening|position_ids_start|padding_free",
        r"docs/padding\.md",
        "other packages",
    ),
    Allowed(
        "identifiers",
        r"TUTORIAL_\w+",
        r"(docs/notebook\.md|examples/notebooks/.*)",
        "settings of the notebook by their names in capitals",
    ),
    Allowed("identifiers", r"is_torchdynamo_compiling", r"docs/.*", "transformers"),
    Allowed("identifiers", r"param_group", r"(src|docs/notes)/.*", "one of torch's param_groups"),
    Allowed("identifiers", r"grad_scale", r"src/.*", "an argument of torch's fused optimizers"),
    Allowed("identifiers", r"create_dynamic_map", r"tests/.*", "bitsandbytes"),
    Allowed(
        "identifiers",
        r"grouped_mm|xlog1py|MADV_HUGEPAGE|torch\..*|onnxscript|keep_io_types",
        r"docs/(log\.md|notes/.*)",
        "torch, Linux, and packages that were weighed",
    ),
)
