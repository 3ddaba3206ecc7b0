"""What each setting is: its words for people, read where the setting is declared, and what values it takes.

The text below a field of a settings class describes it, and a comment `# == Topic ==` begins a topic. `--help` and the
reference pages are made of these, so that nothing is described twice. Where the source is not installed there are no
descriptions, and everything else works.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import msgspec

_TOPIC: Final = re.compile(r"^\s*# == (.+) ==\s*$")
_SENTENCE_END: Final = re.compile(r"(?<=\.) (?=[A-Z0-9`])")
FEATURES: Final = "features"
"""The field of a server's settings that holds those of its features, and is none itself."""
OTHER: Final = "Other"
"""The topic of settings that name none."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a settings class."""

    name: str
    topic: str
    description: str
    """All that is said of it, in one paragraph; empty where the source is not installed."""
    kind: str
    """What stands for its value in usage lines: `INTEGER`, `NUMBER`, `PATH`, `TEXT`, `LIST`, `BOOL` or `CHOICE`."""
    bounds: str
    """Of a number; else empty."""
    choices: tuple[str, ...]
    default: Any

    @property
    def option(self) -> str:
        """As it is written on a command line."""
        return f"--{self.name.replace('_', '-')}"

    @property
    def summary(self) -> str:
        """The first sentence of the description."""
        return first_sentence(self.description)

    @property
    def shown_default(self) -> str:
        """The default as a person would write it."""
        if self.default is None or self.default == ():
            return "none"
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return ",".join(map(str, self.default)) if isinstance(self.default, tuple) else str(self.default)


@functools.cache
def settings_of(*kinds: type[msgspec.Struct]) -> tuple[Setting, ...]:
    """Every setting of these structs (see `structs_of`), in the order of their declarations."""
    return tuple(setting for kind in kinds for setting in _settings(kind))


def _settings(kind: type[msgspec.Struct]) -> Iterator[Setting]:
    texts: dict[str, tuple[str, str]] = {}
    for declared in reversed(kind.__mro__):
        if declared not in (object, msgspec.Struct) and issubclass(declared, msgspec.Struct):
            texts |= {name: (topic, text) for name, topic, text in _described(declared)}
    described = msgspec.inspect.type_info(kind)
    assert isinstance(described, msgspec.inspect.StructType)
    types = {field.name: field.type for field in described.fields}
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in msgspec.structs.fields(kind) if field.name != FEATURES}
    for name in sorted(fields, key=[*texts, *fields].index):
        yield _setting(fields[name], types[name], hints[name], *texts.get(name, (OTHER, "")))


def topics_of(settings: Sequence[Setting]) -> dict[str, list[Setting]]:
    """The settings by topic, topics in the order in which they are first named."""
    topics: dict[str, list[Setting]] = {}
    for setting in settings:
        topics.setdefault(setting.topic, []).append(setting)
    return topics


def first_sentence(text: str) -> str:
    """The text up to the first full stop that a capital, a digit or code follows."""
    return _SENTENCE_END.split(text, maxsplit=1)[0]


def _described(kind: type) -> Iterator[tuple[str, str, str]]:
    """(name, topic, description) of each field that a class declares itself."""
    try:
        source = textwrap.dedent(inspect.getsource(kind))
    except (OSError, TypeError):  # only compiled files are installed, or it was made by a call
        return
    lines = source.splitlines()
    body = ast.parse(source).body[0]
    assert isinstance(body, ast.ClassDef)
    for place, statement in enumerate(body.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        topic = next((m[1] for line in reversed(lines[: statement.lineno]) if (m := _TOPIC.match(line))), OTHER)
        following = body.body[place + 1] if place + 1 < len(body.body) else None
        text = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = " ".join(str(following.value.value).split())
        yield statement.target.id, topic, text


def _setting(
    field: msgspec.structs.FieldInfo, of_type: msgspec.inspect.Type, hint: Any, topic: str, description: str
) -> Setting:
    inner = _without_none(of_type)
    # By the hint, because msgspec sorts what there is to choose from.
    choices = tuple(map(str, typing.get_args(hint))) if typing.get_origin(hint) is Literal else ()
    return Setting(
        name=field.encode_name,
        topic=topic,
        description=description,
        kind=_kind(inner),
        bounds=_bounds(inner),
        choices=choices,
        default=field.default,
    )


def _without_none(of_type: msgspec.inspect.Type) -> msgspec.inspect.Type:
    if isinstance(of_type, msgspec.inspect.UnionType):
        return next(t for t in of_type.types if not isinstance(t, msgspec.inspect.NoneType))
    return of_type


def _kind(of_type: msgspec.inspect.Type) -> str:
    """What stands for a value in usage lines."""
    match of_type:
        case msgspec.inspect.LiteralType():
            return "CHOICE"
        case msgspec.inspect.BoolType():
            return "BOOL"
        case msgspec.inspect.IntType():
            return "INTEGER"
        case msgspec.inspect.FloatType():
            return "NUMBER"
        case msgspec.inspect.VarTupleType():
            return "LIST"
        case msgspec.inspect.CustomType(cls=cls) if cls.__name__ == "Path":
            return "PATH"
        case _:
            return "TEXT"


def _bounds(of_type: msgspec.inspect.Type) -> str:
    """The bounds of a number, for people; empty for everything else."""
    if not isinstance(of_type, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        return ""
    low = f"at least {of_type.ge:,}" if of_type.ge is not None else ""
    low = f"more than {of_type.gt:,g}" if of_type.gt is not None else low
    high = f"at most {of_type.le:,}" if of_type.le is not None else ""
    high = f"less than {of_type.lt:,g}" if of_type.lt is not None else high
    return ", ".join(word for word in (low, high) if word).replace(".0,", ",").removesuffix(".0")
