"""Where options come from besides the command line: a YAML file (`--config run.yaml`), and over it
environment variables such as `ONWARD_FINETUNE_MAX_STEPS`. All values are texts, as on the command
line, which is over both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from onward.environment import environment_variables
from onward.recipes.options import InputError

if TYPE_CHECKING:
    import yaml

Source = Literal["command line", "environment", "file"]
CONFIG = "config"  # the switch that names the file
MOST = 1 << 20  # bytes of a file
_YAML = "tag:yaml.org,2002:"
_SCALARS = ("str", "int", "float", "bool", "null", "timestamp")


@dataclass(frozen=True)
class Given:
    """An option's value as text, and where it stands. spelled: the option's name as written."""

    spelled: str
    value: str
    where: str
    source: Source = "command line"


def of_environment(verb: str) -> Iterator[Given]:
    """The options that variables set for a verb, by the rest of their names in small letters. An
    empty value counts as unset, as everywhere in the environment."""
    prefix = f"ONWARD_{verb.upper()}_"
    for name, value in sorted(environment_variables().items()):
        if name.startswith(prefix) and value:
            where = f"in the variable {name}"
            yield Given(name.removeprefix(prefix).lower(), value, where, "environment")


def of_file(path: str) -> Iterator[Given]:
    """The options in a YAML file, which is one mapping of names to values or lists of them. Raises
    InputError, with the line, for anything else; nothing in the file is constructed or run."""
    found = mapping_of(path)
    yield from () if found is None else given_in(found, path)


def mapping_of(path: str) -> yaml.MappingNode | None:
    """The mapping that a YAML file is, with the lines of what is in it; None for an empty file.
    Raises InputError for anything else."""
    import yaml

    where = f"in --{CONFIG}"
    try:
        with Path(path).open("rb") as file:
            content = file.read(MOST + 1)
        if len(content) > MOST:
            raise InputError(f"{path!r} is over {MOST >> 20} MiB", where, "name a file of options")
        found = yaml.compose(content, Loader=yaml.SafeLoader)
    except (OSError, ValueError) as error:  # of a name with a NUL, or bytes that are no UTF-8
        told = getattr(error, "strerror", None) or str(error)
        raise InputError(f"cannot read {path!r} ({told})", where, "name a YAML file") from error
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f", line {mark.line + 1}"
        is_deep = isinstance(error, RecursionError)
        told = "it nests too deep" if is_deep else getattr(error, "problem", None) or str(error)
        raise InputError(f"{path!r} is no YAML ({told}{line})", where, "write name: value") from (
            error
        )
    if found is None or isinstance(found, yaml.MappingNode):
        return found
    raise InputError(f"{path!r} has no options", where, "write one name: value a line")


def given_in(found: yaml.MappingNode, path: str) -> Iterator[Given]:
    """The options in a mapping of a YAML file. Raises InputError for values of values."""
    for key, value in found.value:
        place = place_of(key, path)
        yield Given(text_of(key, "", place), text_of(value, key.value, place), place, "file")


def place_of(node: yaml.Node, path: str) -> str:
    """Where a node is, for a message."""
    return f"in {path}, line {node.start_mark.line + 1}"


def text_of(node: object, name: object, place: str) -> str:
    """A scalar as it is written, or scalars with commas between them."""
    import yaml

    if isinstance(node, yaml.ScalarNode) and node.tag.removeprefix(_YAML) in _SCALARS:
        return "null" if node.tag == f"{_YAML}null" else str(node.value)
    parts = node.value if name and isinstance(node, yaml.SequenceNode) else [None]
    if all(isinstance(part, yaml.ScalarNode) for part in parts):
        return ",".join(text_of(part, name, place) for part in parts)
    what = f"the value of {name!r}" if name else "a name"
    raise InputError(f"{what} is no text, number, true, false or null", place, "write name: value")


__all__ = [
    "CONFIG",
    "Given",
    "Source",
    "given_in",
    "mapping_of",
    "of_environment",
    "of_file",
    "place_of",
    "text_of",
]
