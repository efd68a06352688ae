"""Reads the prose of the repository (docstrings, comments, pages) for names that are gone.

`CHECKS` is the list of checkers: each takes one `Line` of prose and yields the names on it that do
not exist; `prose_allowed.py` lists names that only look like ours. What exists is read from the
sources, not imported, so that a run takes seconds.
"""

from __future__ import annotations

import dataclasses
import posixpath
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from prose_allowed import ALLOWED

import onward
from onward.cli import VERBS
from onward.environment import VARIABLES
from onward.graph.ops import OWN
from onward.recipes.bench_options import BenchConfig
from onward.recipes.chat_options import ChatConfig
from onward.recipes.config_options import ShowConfig
from onward.recipes.explain_options import ExplainConfig
from onward.recipes.export_options import ExportConfig
from onward.recipes.option_sources import CONFIG
from onward.recipes.options import DataConfig, FinetuneConfig, PretrainConfig, VerifyConfig
from onward.recipes.report_options import ReportConfig
from onward.recipes.search_options import SearchConfig
from onward.recipes.simulate_options import SimulateConfig
from onward.recipes.sweep_file import SweepConfig
from onward.recipes.switches import RENAMED, SWITCHES
from onward.recipes.train_onnx_options import TrainOnnxConfig, VerifyOnnxConfig
from onward.rewrite.lists import switches as pass_names

ROOT = next(p for p in Path(__file__).resolve().parents if (p / "pyproject.toml").exists())
SOURCES = ("src", "benchmarks", "tests", "examples", "deploy")
PAGES = ("docs", "examples", "tests")
TOP_PAGES = ("README.md", "CHANGELOG.md", "AGENTS.md", "CONTRIBUTING.md", "SECURITY.md")


class Line(NamedTuple):
    """One line of prose: `path` is relative to the repository, `text` has no comment sign."""

    path: str
    number: int
    text: str


# ---- prose

_STRING = re.compile(r'("""|\'\'\')(.*?)\1', re.DOTALL)


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """The first line's number and the text of each string in three quotes that begins a line:
    docstrings of modules, classes, functions and attributes."""
    for found in _STRING.finditer(text):
        start = text.rfind("\n", 0, found.start()) + 1
        if text[start : found.start()].strip() in ("", "r"):
            yield text.count("\n", 0, found.start()) + 1, found[2]


_COMMENT = re.compile(r"(?:^|\s)#+(?: (.*))?$")


def comments(text: str) -> Iterator[tuple[int, str]]:
    """The number and the text of each comment, without its `#`; one in a string counts too."""
    for number, line in enumerate(text.splitlines(), 1):
        if "#" in line and (found := _COMMENT.search(line)):
            yield number, found[1] or ""


def code(text: str) -> str:
    """A Python file without its docstrings and comments."""
    kept = _STRING.sub(
        lambda found: "" if not _before(text, found.start()).strip(" r\n") else found[0], text
    )
    return "\n".join(_COMMENT.sub("", line) if "#" in line else line for line in kept.splitlines())


def _before(text: str, end: int) -> str:
    return text[text.rfind("\n", 0, end) + 1 : end]


def prose_of_source(path: str, text: str) -> Iterator[Line]:
    """The lines of a Python file's docstrings and comments."""
    for start, docstring in docstrings(text):
        for i, line in enumerate(docstring.splitlines()):
            yield Line(path, start + i, line)
    for number, comment in comments(text):
        yield Line(path, number, comment)


def prose_of_page(path: str, text: str) -> Iterator[Line]:
    """The lines of a page, `$ ` before those of a block of code; of the changelog, those of what
    is not released."""
    block = False
    for number, line in enumerate(text.splitlines(), 1):
        if path == "CHANGELOG.md" and re.match(r"## \d", line):
            return
        block ^= line.startswith("```")
        yield Line(path, number, f"$ {line}" if block else line)


@cache
def files() -> frozenset[str]:
    """Every file and folder of the repository that prose may name, relative to its root."""
    found = {path.name for path in ROOT.iterdir()}
    for folder in (*SOURCES, "docs", ".ci"):
        for path in (ROOT / folder).rglob("*"):
            if "__pycache__" not in path.parts and path.suffix != ".so":
                found.add(path.relative_to(ROOT).as_posix())
    return frozenset(found)


@cache
def texts() -> Mapping[str, str]:
    """The text of each Python file and of each page, by its path."""
    pages = {name for name in files() if name.endswith(".md") and name.split("/")[0] in PAGES}
    sources = {
        name for name in files() if name.endswith(".py") and name.split("/")[0] in SOURCES
    } | {"setup.py"}
    return {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in sorted({*TOP_PAGES, *pages, *sources})
    }


@cache
def prose() -> tuple[Line, ...]:
    """All prose of the repository, line by line."""
    lines: list[Line] = []
    for path, text in texts().items():
        if path in sources():
            lines.extend(prose_of_source(path, text))
        elif path.endswith(".md"):
            lines.extend(prose_of_page(path, text))
    return tuple(lines)


# ---- what exists


@cache
def sources() -> tuple[str, ...]:
    """The Python files, but for this one and its tests, which hold names of what is not there."""
    mine = ("prose.py", "prose_allowed.py", "test_prose.py")
    return tuple(
        path for path in texts() if path.endswith(".py") and path.rpartition("/")[2] not in mine
    )


@cache
def words_of(path: str) -> frozenset[str]:
    """Every word in the code of a Python file: names, and the words of its strings."""
    return frozenset(re.findall(r"[A-Za-z_]\w*", code(texts()[path])))


@cache
def words() -> frozenset[str]:
    """Every word in the code of the repository, C++ among it, and in its settings."""
    found = frozenset().union(*map(words_of, sources()))
    native = (ROOT / "src" / "onward" / "kernels" / "native" / "src").iterdir()
    more = [path.read_text(encoding="utf-8") for path in (*native, ROOT / "pyproject.toml")]
    return found.union(*(re.findall(r"[A-Za-z_]\w*", text) for text in more))


@cache
def file_names() -> frozenset[str]:
    """The names of files that the package or a test writes or reads, as its code has them."""
    pattern = re.compile(r"[\w.-]+\.(?:jsonl?|md|svg|txt|py)\b")
    return frozenset(name for path in sources() for name in pattern.findall(code(texts()[path])))


class Class(NamedTuple):
    """A class of the package: its file, the names of its attributes, those of its bases."""

    path: str
    attributes: frozenset[str]
    bases: tuple[str, ...]


_CLASS = re.compile(r"^class (\w+)(?:\(([^)]*)\))?:\n((?:(?: .*)?\n)*)", re.MULTILINE)
_ATTRIBUTE = re.compile(
    r"^ +(?:async )?(?:def|class) (\w+)|^    (\w+)(?:: .*| = .*)$|\bself\.(\w+)", re.MULTILINE
)


@cache
def classes() -> Mapping[str, tuple[Class, ...]]:
    """The classes of the package by name."""
    found: dict[str, list[Class]] = defaultdict(list)
    for path, text in texts().items():
        if path.startswith("src/"):
            for name, bases, body in _CLASS.findall(code(text)):
                attributes = {word for each in _ATTRIBUTE.findall(body) for word in each if word}
                named = tuple(re.findall(r"[\w.]+", re.sub(r"\[.*?\]", "", bases)))
                found[name].append(Class(path, frozenset(attributes), named))
    return {name: tuple(each) for name, each in found.items()}


def has_attribute(name: str, attribute: str, path: str = "") -> bool:
    """Whether a class of this name (the one of this file), or one that it inherits from, has the
    attribute. A base that is not of the package may have anything."""
    for each in classes()[name]:
        if path and each.path != path:
            continue
        if attribute in each.attributes:
            return True
        for base in each.bases:
            if base in ("NamedTuple", "Protocol", "Enum", "Generic", "Exception", "UserWarning"):
                continue
            if base not in classes() or (base != name and has_attribute(base, attribute)):
                return True
    return False


def resolves(dotted: str) -> bool:
    """Whether `onward.a.b` is a module, or a name in one, or an attribute of a class there."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        stem = "/".join(("src", *parts[:length]))
        path = next((p for p in (f"{stem}.py", f"{stem}/__init__.py") if p in texts()), None)
        if path is None:
            continue
        rest = parts[length:]
        if not rest:
            return True
        if rest[0] not in words_of(path):
            return False
        if len(rest) == 1 or rest[0] not in classes():
            return True
        if length == 1:  # a public name, of a class in a module below
            module = getattr(onward, rest[0]).__module__
            path = next(p for p in texts() if p.endswith(module.replace(".", "/") + ".py"))
        return has_attribute(rest[0], rest[1], path)
    return False


@cache
def options() -> frozenset[str]:
    """The fields of `TrainerOptions`, of `ModuleOptions` and of `FitOptions`."""
    kinds = (onward.TrainerOptions, onward.ModuleOptions, onward.FitOptions)
    return frozenset(field.name for kind in kinds for field in dataclasses.fields(kind))


# switches of pip, pytest and setup.py, and of `onward doctor` and `onward cache`, which have no
# class of options
_OTHERS = (
    "constraint", "clear", "dist", "durations", "editable", "fastest", "levels", "measure",
    "sanitize",
)  # fmt: skip


@cache
def switches() -> frozenset[str]:
    """Every `--switch` of onward's commands, of the scripts here and of pytest as used here."""
    found = {CONFIG, "help", "version", *RENAMED, *SWITCHES, *_OTHERS}
    for config in (
        FinetuneConfig, VerifyConfig, DataConfig, ExplainConfig, SimulateConfig, ShowConfig,
        ChatConfig, ExportConfig, SweepConfig, BenchConfig, PretrainConfig, ReportConfig,
        SearchConfig, TrainOnnxConfig, VerifyOnnxConfig,
    ):  # fmt: skip
        found.update(config.__dataclass_fields__)
    for path in sources():
        found.update(
            re.findall(
                r"""(?:add_?(?:argument|option)|startswith)\(\s*["']--([a-z][\w-]*)""",
                texts()[path],
            )
        )
    return frozenset(name.replace("-", "_") for name in found)


@cache
def targets() -> frozenset[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


@cache
def make_variables() -> frozenset[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return frozenset(re.findall(r"^([A-Z_]+) [?:]?=", makefile, re.MULTILINE))


def slug(heading: str) -> str:
    """The anchor that GitHub gives a heading."""
    plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")


@cache
def anchors(path: str) -> frozenset[str]:
    text = re.sub(r"^```.*?^```$", "", texts()[path], flags=re.DOTALL | re.MULTILINE)
    return frozenset(slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE))


# ---- checks

Check = Callable[[Line], Iterator[str]]

_FILE = r"(?:\.\./)*(?:[\w.<>*-]+/)*[\w.<>*-]+\.(?:py|md|cpp|h|jsonl?|svg|toml|txt)"
_PATH = re.compile(rf"(?<![\w/.:<>*~$-])({_FILE})(?![\w/]|\.\w)")
_FOLDER = re.compile(r"`((?:src|tests|docs|benchmarks|examples)(?:/[\w-]+)*/?)`")
_ANY = re.compile(r"<\w+>|\*|\b(?:NAME|DATE|FILE)\b")  # what stands for many


def _there(path: str, page: str) -> bool:
    """Whether the repository has this path: from its root, from the package, from the folder of
    the page or one around it. A file without a folder may be any file, or one that code names."""
    path, folder = path.rstrip("/"), page.rpartition("/")[0]
    pattern = re.compile("[^/]*".join(map(re.escape, _ANY.split(path))))
    if path.startswith("../"):
        return posixpath.normpath(f"{folder}/{path}") in files()
    if "/" not in path:
        return any(pattern.fullmatch(name.rpartition("/")[2]) for name in files()) or (
            path in file_names()
        )
    around = folder.split("/")
    roots = ["", "src/onward/", *("/".join(around[:i]) + "/" for i in range(1, len(around) + 1))]
    if not _ANY.search(path):
        return any(root + path in files() for root in roots)
    return any(
        name.startswith(root) and pattern.fullmatch(name.removeprefix(root))
        for root in roots
        for name in files()
    )


def paths(line: Line) -> Iterator[str]:
    """`capture/export.py`, `tests/x/test_y.py`, `docs/notes/`, `kernels/native/src/<name>.cpp`."""
    text = re.sub(r"\w+://\S+", "", line.text)
    for found in (*_PATH.findall(text), *_FOLDER.findall(text)):
        if not _there(found, line.path):
            yield found


def links(line: Line) -> Iterator[str]:
    """`[text](relative/path.md#anchor)` of a page."""
    if not line.path.endswith(".md"):
        return
    for target in re.findall(r"\]\(([^)\s]+)\)", line.text):
        if re.match(r"\w+:", target):
            continue
        name, _, anchor = target.partition("#")
        path = (ROOT / line.path).parent / name if name else ROOT / line.path
        if not path.exists():
            yield target
        elif anchor:
            relative = path.resolve().relative_to(ROOT).as_posix()
            if relative not in texts() or anchor not in anchors(relative):
                yield target


def trainer_options(line: Line) -> Iterator[str]:
    """`TrainerOptions(name=...)`, `TrainerOptions.name`, `options.name` in backticks."""
    for kind, inside in re.findall(r"\b((?:Trainer|Module)Options)\(([^()]*)", line.text):
        for name in re.findall(r"(?:^|, *)(\w+)=", inside):
            if name not in options():
                yield f"{kind}({name}=)"
    for name in re.findall(r"\b(?:Trainer|Module)Options\.([a-z_]\w*)", line.text):
        if name not in options():
            yield f"TrainerOptions.{name}"


def command_line(line: Line) -> Iterator[str]:
    """`--switch` and `onward verb`."""
    for name in re.findall(r"(?<![\w-])--([a-z][\w-]*)", line.text):
        if name.replace("-", "_") not in switches():
            yield f"--{name}"
    for name in re.findall(r"(?:`|^\$ )onward ([a-z]+)(?=[` ]|$)", line.text):
        if name not in VERBS:
            yield f"onward {name}"


def make(line: Line) -> Iterator[str]:
    """`make target` in backticks or as a command of its own, and `TEST_ARGS=`."""
    for name in re.findall(r"(?:`|^\$ )make ([a-z][a-z-]*)(?=[` ]|$)", line.text):
        if name not in targets():
            yield f"make {name}"
    for name in re.findall(r"\b([A-Z]+_(?:ARGS|OUT|WORKERS))\b", line.text):
        if name not in make_variables():
            yield name


def variables(line: Line) -> Iterator[str]:
    """`ONWARD_NAME`."""
    for name in re.findall(r"\bONWARD_[A-Z_]+\b", line.text):
        option = re.sub(r"^ONWARD_(FINETUNE|VERIFY|DATA|EXPLAIN|SIMULATE)_", "", name).lower()
        if name not in VARIABLES and option not in switches():
            yield name


def rewrite_passes(line: Line) -> Iterator[str]:
    """ "the pass `name`", "`name` pass", `disable="name"` and `ONWARD_DISABLE=name,name`."""
    found = re.findall(r"\bpass(?:es)? `([a-z_]+)`|`([a-z_]+)` pass(?:es)?\b", line.text)
    named = [name for pair in found for name in pair if name]
    for group in re.findall(r"""\b(?:disable=\(?["']|ONWARD_DISABLE=)([\w"', ]+)""", line.text):
        named += re.findall(r"[a-z][a-z_]+", group.split(")")[0].split("`")[0])
    for name in named:
        if name not in pass_names():
            yield f"pass {name}"


def dotted(line: Line) -> Iterator[str]:
    """`onward.module.name`, and `Class.attribute` of a class of the package."""
    for name in re.findall(r"(?<![\w./-])onward(?:\.[A-Za-z_]\w*)+", line.text):
        op = name.removeprefix("onward.")
        if not resolves(name) and op not in OWN:
            yield name
    for owner, attribute in re.findall(r"`+([A-Z]\w*)\.([A-Za-z_]\w*)[^`]*`", line.text):
        if owner in classes() and not has_attribute(owner, attribute):
            yield f"{owner}.{attribute}"


# What a variable of this name is in prose, and the file of its class.
_INSTANCES = {
    "trainer": ("Trainer", "src/onward/train/trainer.py"),
    "result": ("StepResult", "src/onward/train/result.py"),
    "plan": ("Plan", "src/onward/plan/plan.py"),
    "options": ("TrainerOptions", "src/onward/options.py"),
}


def instances(line: Line) -> Iterator[str]:
    """`trainer.name`, `result.name` and the like, which are attributes of the class."""
    for variable, attribute in re.findall(r"`+(\w+)\.([a-z_]\w*)[^`]*`", line.text):
        owner, path = _INSTANCES.get(variable, ("", ""))
        if attribute != "py" and owner and not has_attribute(owner, attribute, path):
            yield f"{variable}.{attribute}"


def places(line: Line) -> Iterator[str]:
    """ "`NAME` of `path.py`", and "`path.py`'s `NAME`"."""
    file = r"`((?:[\w-]+/)*\w+\.py)`"
    found = [
        *re.findall(rf"`(\w+)(?:\(\))?` (?:of|in|from) {file}", line.text),
        *((b, a) for a, b in re.findall(rf"{file}'s `(\w+)(?:\(\))?`", line.text)),
    ]
    for name, path in found:
        known = [p for p in texts() if p == path or p.endswith(f"/{path}")]
        if known and not any(name in words_of(p) for p in known):
            yield f"{name} of {path}"


@cache
def parts_of_paths() -> frozenset[str]:
    """The names of folders and files, without their endings."""
    return frozenset(part.partition(".")[0] for name in files() for part in name.split("/"))


def _is_said(word: str) -> bool:
    """Whether the code has the word, or a file's name is that; a number behind it may be made."""
    stem = re.sub(r"_\d+$", "", word)
    return any(each in known for known in (words(), parts_of_paths()) for each in (word, stem))


def identifiers(line: Line) -> Iterator[str]:
    """`name`, `name()`, `module.name`: words that stand nowhere in the code."""
    for name in re.findall(r"`+([A-Za-z_][\w.]*)(?:\([^`]*\))?`", line.text):
        if not _PATH.fullmatch(name) and not all(
            _is_said(part) for part in name.split(".") if part and not part.isdigit()
        ):
            yield name


CHECKS: tuple[Check, ...] = (
    paths, links, trainer_options, command_line, make, variables, rewrite_passes, dotted,
    instances, places, identifiers,
)  # fmt: skip


def allowed(check: Check, line: Line, name: str) -> bool:
    return any(
        each.check == check.__name__
        and re.fullmatch(each.names, name)
        and re.fullmatch(each.where, line.path)
        for each in ALLOWED
    )


def missing(check: Check, lines: Iterable[Line]) -> list[str]:
    """`file:line: names X, which is not there`, of each name that is not and is not allowed."""
    return [
        f"{line.path}:{line.number}: names {name}, which is not there"
        for line in lines
        for name in dict.fromkeys(check(line))
        if not allowed(check, line, name)
    ]


# ---- the page of guarantees


class Promise(NamedTuple):
    """A row of a table of `docs/guarantees.md`: the promise, and the files that hold it."""

    number: int
    text: str
    tests: tuple[str, ...]


def promises(page: str) -> Iterator[Promise]:
    """Every row with a test."""
    for number, line in enumerate(page.splitlines(), 1):
        cells = line.strip().strip("|").rsplit(" | ", 1)
        if line.startswith("|") and len(cells) == 2 and "`" in cells[1]:
            yield Promise(number, cells[0].strip(), tuple(re.findall(r"`([^`]+)`", cells[1])))


def without_test(page: str) -> list[str]:
    """Rows of the page's tables that name no test."""
    lines = page.splitlines()
    named = {each.number for each in promises(page)}
    rules = {i for i, line in enumerate(lines, 1) if re.fullmatch(r"[|: -]*-[|: -]*", line)}
    return [
        f"row {number} names no test"
        for number, line in enumerate(lines, 1)
        if line.startswith("|") and not {number, number + 1} & rules and number not in named
    ]


_EMPTY = frozenset(
    ("a", "an", "and", "are", "as", "at", "be", "by", "for", "in", "is", "it", "of", "on", "or")
)


def alike(page: str) -> list[str]:
    """Pairs of rows that say the same, which is to share four in five of their larger words."""
    rows = [
        (each.number, frozenset(re.findall(r"\w+", each.text.lower())) - _EMPTY)
        for each in promises(page)
    ]
    return [
        f"rows {first} and {second} say the same"
        for i, (first, one) in enumerate(rows)
        for second, other in rows[i + 1 :]
        if len(one & other) >= 0.8 * len(one | other)
    ]


_SKIPPED = re.compile(
    r"^pytestmark = .*pytest\.mark\.skip\b|^pytest\.skip\(.*allow_module_level", re.MULTILINE
)


_COLLECTED = re.compile(r"tests/(?:\w+/)*test_\w+\.py")
_TEST = re.compile(r"^ *(?:async )?def test_", re.MULTILINE)


def untested(page: str, texts: Mapping[str, str]) -> list[str]:
    """Rows whose test is no test: a file that is not there, that pytest does not collect, or that
    is skipped as a whole. A folder has to hold one that is none of it."""
    wrong = []
    for row in promises(page):
        for name in row.tests:
            inside = [
                text
                for path, text in texts.items()
                if (path == name or path.startswith(f"{name}/")) and _COLLECTED.fullmatch(path)
            ]
            if not any(_TEST.search(text) and not _SKIPPED.search(text) for text in inside):
                wrong.append(f"row {row.number} names {name}, which tests nothing")
    return wrong


# ---- how docstrings begin

# A docstring that begins so says nothing without the line above it.
NO_SUBJECT = re.compile(
    r"\s*(?:(?:Of|The same|Those|Their|Its|It|They|That|These|Which|Such|Another|Likewise|And"
    r"|As|Whether (?:it|they|this|that|those|these))\b|Whether .*\bthe same\.?$)"
)


def without_subject(text: str) -> Iterator[tuple[int, str]]:
    """The line and the beginning of each docstring, and of each comment on lines of its own, that
    has no subject of its own."""
    for number, docstring in docstrings(text):
        first = docstring.lstrip("\n").splitlines()[0] if docstring.strip() else ""
        if NO_SUBJECT.match(first):
            yield number, first.strip()
    lines, last = text.splitlines(), -1
    for number, comment in comments(text):
        if lines[number - 1].lstrip().startswith("#"):
            if last != number - 1 and NO_SUBJECT.match(comment[:1].upper() + comment[1:]):
                yield number, comment
            last = number
