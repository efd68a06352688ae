"""The command line: `onward COMMAND`, one function for each command."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import onward
from onward.environment import tell_own_command
from onward.errors import OnwardError
from onward.import_signals import interrupts_end_imports
from onward.memory_amounts import mib
from onward.recipes.bench_options import BenchConfig, check_bench
from onward.recipes.chat_options import ChatConfig, check_chat
from onward.recipes.config_options import ShowConfig, shown_schema, shown_values
from onward.recipes.explain_options import ExplainConfig
from onward.recipes.export_options import ExportConfig, check_export
from onward.recipes.option_places import placed
from onward.recipes.option_sources import CONFIG, Given
from onward.recipes.options import (
    DataConfig,
    FinetuneConfig,
    InputError,
    PretrainConfig,
    VerifyConfig,
    check_options,
)
from onward.recipes.parsing import ABOUT, parse, parse_with_places, suggestion
from onward.recipes.report_options import ReportConfig
from onward.recipes.search_options import SearchConfig, check_search
from onward.recipes.simulate_options import SimulateConfig
from onward.recipes.stop_signals import Stopped
from onward.recipes.sweep_file import SweepConfig
from onward.recipes.switches import Foreign
from onward.recipes.train_onnx_options import (
    TrainOnnxConfig,
    VerifyOnnxConfig,
    check_train,
    check_verify,
)

Config = TypeVar("Config")
RunConfig = TypeVar("RunConfig", bound=FinetuneConfig)
Settled = TypeVar("Settled", bound=FinetuneConfig)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line; returns its exit status: 2 for bad input, 130 when interrupted, 143
    when terminated in training, 141 if the reader of a pipe is gone."""
    if argv is None:
        tell_own_command()
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except BrokenPipeError:  # `onward ... | head`
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # buffered output has no reader
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return 141
    return status


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    verb, *rest = arguments
    if verb == "--version":
        print(f"onward {onward.__version__}")
        return 0
    prog = "onward"
    try:
        if verb not in VERBS:
            raise InputError(
                f"unknown command {verb!r}", "as the first word", suggestion(verb, list(VERBS), "")
            )
        prog = f"onward {verb}"
        with interrupts_end_imports(f"{prog}: interrupted\n"):
            return VERBS[verb][1](rest)
    except OnwardError as error:
        print(f"{prog}: error: {str(error).strip().splitlines()[0]}", file=sys.stderr)
        return 2
    except Stopped as stopped:
        print(f"{prog}: {stopped}", file=sys.stderr)
        return stopped.status
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 130


def usage() -> str:
    """The text that `onward --help` prints."""
    lines = ["usage: onward COMMAND [--option value ...]", "", "commands:"]
    lines += [f"  {name:<10} {help}" for name, (help, _) in VERBS.items()]
    lines += [
        "",
        "`onward COMMAND --help` shows the options of one; `onward --version` the version.",
    ]
    return "\n".join(lines)


def run_finetune(argv: list[str]) -> int:
    """Runs `onward finetune` and returns its exit status."""
    if argv and argv[0].startswith("--engine_job="):
        # One engine of a comparison: `--engine_job=FOLDER ENGINE OUTPUT`, written by compare.
        from transformers.utils import logging

        from onward.recipes.compare import run_job

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        run_job(Path(argv[0].partition("=")[2]), argv[1], Path(argv[2]))
        return 0
    return _trained(argv, "finetune", FinetuneConfig, lambda config, ranks: config)


def run_pretrain(argv: list[str]) -> int:
    """Runs `onward pretrain` and returns its exit status."""
    from onward.recipes.pretrain import as_finetune

    return _trained(argv, "pretrain", PretrainConfig, as_finetune)


def _trained(
    argv: list[str],
    verb: str,
    kind: type[RunConfig],
    settled: Callable[[RunConfig, int], FinetuneConfig],
) -> int:
    """Runs a verb that trains. settled: makes options of finetune for so many processes."""
    from onward.recipes.started_processes import quiet_unless_first, started

    with quiet_unless_first():
        try:
            config = _of_run(argv, verb, kind, lambda given: settled(given, started()[1]))
        except OnwardError as error:
            if started()[0]:  # rank 0 says it
                raise SystemExit(2) from error
            raise
        if config is None:
            return 0
        from onward.recipes import finetune

        return finetune.finetune(config, ["onward", verb, *argv])


def run_verify(argv: list[str]) -> int:
    """Runs `onward verify`, of options, a RUN or a MODEL.onnx, and returns its exit status."""
    if argv and argv[0].endswith(".onnx"):
        return _verify_onnx(argv)
    if argv and not argv[0].startswith("-"):
        if odd := [word for word in argv[1:] if word != "--bisect"]:
            raise InputError(
                f"{odd[0]!r} beside a run, which has its options",
                "on the command line",
                "remove it, or name no run",
            )
        _tell_loading("verify", argv[0])
        from onward.recipes.verify import verify_run

        return verify_run(Path(argv[0]), "--bisect" in argv)
    config = _of_run(argv, "verify", VerifyConfig, lambda given: given)
    if config is None:
        return 0
    from onward.recipes.verify import verify

    return verify(config, config.bisect)


def _verify_onnx(argv: list[str]) -> int:
    config = _parse_behind_word(argv, "verify", VerifyOnnxConfig, "MODEL.onnx", "name one")
    if config is None:
        return 0
    check_verify(config)
    _tell_loading("verify", argv[0])
    from onward.recipes.onnx_subject import verify_onnx

    return verify_onnx(argv[0], config)


def run_data(argv: list[str]) -> int:
    """Runs `onward data` and returns its exit status."""
    config = _of_run(argv, "data", DataConfig, lambda given: given)
    if config is None:
        return 0
    from onward.recipes.preview import preview

    return preview(config)


def _of_run(
    argv: list[str], verb: str, kind: type[RunConfig], settled: Callable[[RunConfig], Settled]
) -> Settled | None:
    """Parses, settles and checks the options of a run, and writes a line, all before the seconds
    that torch takes to import; None after `--help`."""
    given = parse(argv, verb, kind)
    if given is None:
        return None
    config = settled(given)
    check_options(config)
    _tell_loading(verb, config.model_name_or_path)
    return config


def run_explain(argv: list[str]) -> int:
    """Runs `onward explain MODEL_OR_SCRIPT` and returns its exit status."""
    words, arguments = argv, list[str]()
    if "--" in argv:
        words, arguments = argv[: argv.index("--")], argv[argv.index("--") + 1 :]
    fix = "give one, such as onward explain gpt2-tiny"
    config = _parse_behind_word(words, "explain", ExplainConfig, "MODEL_OR_SCRIPT", fix)
    if config is None:
        return 0
    from onward.recipes.explain import explain

    return explain(words[0], config, arguments)


def run_train(argv: list[str]) -> int:
    """Runs `onward train MODEL.onnx` and returns its exit status."""
    fix = "give one, such as onward train model.onnx --data train.npz"
    config = _parse_behind_word(argv, "train", TrainOnnxConfig, "MODEL.onnx", fix)
    if config is None:
        return 0
    check_train(config)
    _tell_loading("train", argv[0])
    from onward.recipes.train_onnx import train

    return train(argv[0], config)


def run_simulate(argv: list[str]) -> int:
    """Runs `onward simulate CLUSTER` and returns its exit status."""
    fix = "give a file or a name, such as onward simulate h100 --model gpt2-xl"
    config = _parse_behind_word(argv, "simulate", SimulateConfig, "CLUSTER", fix)
    if config is None:
        return 0
    from onward.recipes.simulate import simulate

    return simulate(argv[0], config)


def run_report(argv: list[str]) -> int:
    """Runs `onward report RUN [RUN2]` and returns its exit status."""
    several = len(argv) > 1 and not any(word.startswith("-") for word in argv[:2])
    folders, words = argv[: 1 + several], [*argv[:1], *argv[1 + several :]]
    fix = "give a run's folder, such as onward report runs/wiki"
    config = _parse_behind_word(words, "report", ReportConfig, "RUN", fix)
    if config is None:
        return 0
    from onward.recipes.report.write import report

    return report(folders, config)


def _parse_behind_word(
    words: list[str], verb: str, kind: type[Config], word: str, fix: str
) -> Config | None:
    """Parses the options behind a command's first word, which says what it is about; None after
    `--help`. word: its name in the usage line. Raises InputError, with this fix, where there is
    none."""
    asks = any(each in ("-h", "--help") for each in words)
    if not asks and (not words or words[0].startswith("-")):
        what = word.split()[0].lower().replace("_", " ")
        raise InputError(f"no {what} is given", f"as the first word after {verb}", fix)
    return parse(["--help"] if asks else words[1:], verb, kind, Foreign({}, {}), word)


def run_chat(argv: list[str], verb: str = "chat") -> int:
    """Runs `onward chat RUN_OR_MODEL`, or `onward complete`, and returns its exit status."""
    fix = f"give one, such as onward {verb} runs/wiki --prompt Hello"
    config = _parse_behind_word(argv, verb, ChatConfig, "RUN_OR_MODEL", fix)
    if config is None:
        return 0
    check_chat(config)
    _tell_loading(verb, argv[0])
    from transformers.utils import logging

    from onward.recipes.chat import chat

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return chat(argv[0], config, templated=verb == "chat")


def run_complete(argv: list[str]) -> int:
    """Runs `onward complete RUN_OR_MODEL` and returns its exit status."""
    return run_chat(argv, "complete")


def run_search(argv: list[str]) -> int:
    """Runs `onward search RUN` and returns its exit status."""
    fix = "give one, such as onward search runs/towers --query 'open a file'"
    config = _parse_behind_word(argv, "search", SearchConfig, "RUN", fix)
    if config is None:
        return 0
    check_search(config)
    _tell_loading("search", argv[0])
    from transformers.utils import logging

    from onward.recipes.search import search

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return search(argv[0], config)


def _tell_loading(verb: str, name: str) -> None:
    """Says what is about to happen, before the seconds that torch takes to import."""
    if "torch" not in sys.modules:
        print(f"onward {verb}: {name}; loading torch", file=sys.stderr, flush=True)


def run_export(argv: list[str]) -> int:
    """Runs `onward export MODEL_OR_RUN OUT` and returns its exit status."""
    fix = "give one, such as onward export runs/wiki model.onnx"
    words, out = argv, ""
    if len(argv) > 1 and not argv[0].startswith("-") and not argv[1].startswith("-"):
        words, out = [argv[0], *argv[2:]], argv[1]
    config = _parse_behind_word(words, "export", ExportConfig, "MODEL_OR_RUN OUT", fix)
    if config is None:
        return 0
    if not out:
        raise InputError("no file or folder to write is given", "as the second word", fix)
    check_export(config, out)
    _tell_loading("export", argv[0])
    from transformers.utils import logging

    from onward.recipes.export import export

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return export(argv[0], out, config)


def run_merge_lora(argv: list[str]) -> int:
    """Runs `onward merge-lora RUN OUT` and returns its exit status."""
    words = [word for word in argv if not word.startswith("-")]
    if "-h" in argv or "--help" in argv:
        print(f"usage: onward merge-lora RUN OUT\n\n{VERBS['merge-lora'][0]}.")
        return 0
    if len(words) != 2 or len(argv) != 2:
        raise InputError(
            "a run and a new folder are needed",
            "after merge-lora",
            "give both, as in onward merge-lora runs/adapters runs/merged",
        )
    _tell_loading("merge-lora", argv[0])
    from onward.recipes.merge_lora import merge_lora

    return merge_lora(words[0], words[1])


def run_sweep(argv: list[str]) -> int:
    """Runs `onward sweep SWEEP` and returns its exit status."""
    fix = "give a file, such as onward sweep sweep.yaml --output_dir runs/sweep"
    config = _parse_behind_word(argv, "sweep", SweepConfig, "SWEEP", fix)
    if config is None:
        return 0
    from onward.recipes.sweep import sweep

    def check(words: list[str]) -> FinetuneConfig:
        found = parse(words, "finetune", FinetuneConfig)
        assert found is not None, "no help is asked for"
        check_options(found)
        return found

    return sweep(argv[0], config, check)


def run_bench(argv: list[str]) -> int:
    """Runs `onward bench MODEL_OR_SCRIPT` and returns its exit status."""
    if argv == ["--worker"]:  # the process of one engine, started by bench
        from onward.recipes.bench_worker import serve

        return serve()
    fix = "give one, such as onward bench gpt2-tiny"
    config = _parse_behind_word(argv, "bench", BenchConfig, "MODEL_OR_SCRIPT", fix)
    if config is None:
        return 0
    check_bench(argv[0], config)
    from onward.recipes.bench import bench

    return bench(argv[0], config)


_CONFIG_VERBS = {
    "show": "print each option's value and where it comes from",
    "schema": "print the JSON schema of the file of --config",
    "validate": "check such a file: onward config validate run.yaml",
}


def run_config(argv: list[str]) -> int:
    """Runs `onward config show | schema | validate` and returns its exit status."""
    word = argv[0] if argv else ""
    asks = any(each in ("-h", "--help") for each in argv)
    if asks and word != "show":
        print(f"usage: onward config {' | '.join(_CONFIG_VERBS)} [...]\n\n{VERBS['config'][0]}.\n")
        for name, about in _CONFIG_VERBS.items():
            print(f"  {name:<9} {about}")
        print("\n`onward config show --help` lists the options, which are those of finetune.")
        return 0
    if word not in _CONFIG_VERBS:
        what = f"unknown word {word!r}" if word else "no show, schema or validate is given"
        fix = suggestion(word, list(_CONFIG_VERBS), "") if word else "onward config show"
        raise InputError(what, "as the first word after config", fix)
    if word == "show":
        return _show(argv[1:])
    files = argv[1:]
    if word == "schema":
        if files:
            raise InputError(f"unexpected argument {files[0]!r}", "after schema", "leave it out")
        print(shown_schema())
        return 0
    if len(files) != 1 or files[0].startswith("-"):
        raise InputError("exactly one file is needed", "after validate", "name one YAML file")
    found = parse_with_places([f"--{CONFIG}", files[0]], "finetune", FinetuneConfig, others="")
    assert found is not None, "no help is asked for"
    _check_placed(*found)
    print(f"{files[0]}: {len(found[1])} options of onward finetune, all valid")
    return 0


def _show(argv: list[str]) -> int:
    found = parse_with_places(
        argv, "config", ShowConfig, None, "show", "finetune", frozenset({"json"})
    )
    if found is None:
        return 0
    print(shown_values(*found))
    _check_placed(*found)
    return 0


def _check_placed(config: FinetuneConfig, given: dict[str, Given]) -> None:
    """Raises InputError for invalid options, which names their places."""
    try:
        check_options(config)
    except InputError as error:
        raise placed(error, given) from error


def run_doctor(argv: list[str]) -> int:
    """Runs `onward doctor`: versions, what is missing, and which kernels and libraries are used."""
    switches = {
        "measure": "time the matrix products of every BLAS library again (about a second)",
        "gpu": "time the GPUs too, and train a small layer on each",
    }
    given = _switched(argv, "doctor", switches)
    if given is None:
        return 0
    from onward.recipes.doctor import facts

    for line in facts(measure="measure" in given, gpu="gpu" in given):
        print(line, flush=True)
    return 0


def run_cache(argv: list[str]) -> int:
    """Runs `onward cache`: shows where captures, graphs and tokens are stored, how many files there
    are and how large; deletes them on request."""
    given = _switched(argv, "cache", {"clear": "delete all of them"})
    if given is None:
        return 0
    from onward import cache_files

    clear = "clear" in given
    files, nbytes = cache_files.clear() if clear else cache_files.size()
    verb = "removed" if clear else "kept"
    print(f"{cache_files.folder()}: {files} files, {mib(nbytes)}, {verb}")
    return 0


def _switched(argv: list[str], verb: str, switches: Mapping[str, str]) -> set[str] | None:
    """The switches that are given to a command that has no other options; None after `--help`.
    switches: what each does."""
    if "-h" in argv or "--help" in argv:
        print(
            f"usage: onward {verb} {' '.join(f'[--{name}]' for name in switches)}\n\n"
            f"{VERBS[verb][0]}.\n\noptions:\n  -h, --help  show this help"
        )
        for name, about in switches.items():
            print(f"  --{name:<9} {about}")
        return None
    known = {f"--{name}" for name in switches}
    strange = next((word for word in argv if word not in known), None)
    if strange is not None:
        raise InputError(
            f"unknown option {strange!r}",
            "on the command line",
            suggestion(strange.lstrip("-"), [*switches, "help"], "--"),
        )
    return {word.removeprefix("--") for word in argv}


VERBS: dict[str, tuple[str, Callable[[list[str]], int]]] = {
    name: (about, run)
    for (name, about), run in zip(
        ABOUT.items(),
        (
            run_finetune,
            run_pretrain,
            run_train,
            run_verify,
            run_data,
            run_explain,
            run_config,
            run_report,
            run_chat,
            run_complete,
            run_search,
            run_export,
            run_merge_lora,
            run_sweep,
            run_bench,
            run_simulate,
            run_doctor,
            run_cache,
        ),
        strict=True,
    )
}


if __name__ == "__main__":
    sys.exit(main())
