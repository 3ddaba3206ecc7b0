"""Commands and their options, each declared once: as a parameter of a function, or as a field of a struct.

The parser, `--help` and the reference pages are made of its type, its default and a `msgspec.Meta`:

    def keys_add(
        name: Annotated[str, Meta(description="Name of the key's owner.", extra=ARGUMENT)],
        rate: Annotated[float, Meta(gt=0, description="Requests per second.")] | None = None,
    ) -> int | None:                                                 the exit status
        '''Make a key and print it once.'''                          the text of `--help`

- A parameter without a default must be given. A list takes its option several times, or all remaining arguments.
- `bool` is a switch. A trailing `_` is no part of an option's name: `set_` is `--set`.
- `Meta.title` is the topic under which `--help` lists an option.
- `Meta.extra` has `argument` for an argument in place of an option (`ARGUMENT`), `variable`, an environment variable
  that is read if the option is not given, and `name`, another name of the option.
- A function with one parameter, a struct, takes the struct's fields as options: `def run(options: RunOptions)`.
  Commands share options by a struct that others inherit, or by `Task: TypeAlias = Annotated[…]`.

`Group` holds commands by name, and `run` runs the one that a command line names. Modules of commands import what they
need in their functions, so that `--help` is fast; a `Program` reads its words itself. Settings of servers are declared
in the same way (`hawkvision.core.settings`).
"""

from __future__ import annotations

import argparse
import functools
import inspect
import os
import re
import shutil
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

import msgspec

USAGE_STATUS: Final = 2
"""The exit status of a wrong command line."""
REQUIRED: Final = inspect.Parameter.empty
"""The default of what must be given."""
ARGUMENT: Final = {"argument": True}
"""`Meta.extra` of an argument."""
LONGEST_METAVAR: Final = 20
"""Characters; a longer placeholder would leave too little room for descriptions."""
_SENTENCE_END: Final = re.compile(r"(?<=\.) (?=[A-Z0-9`])")
_KINDS: Final[Mapping[type, str]] = {
    msgspec.inspect.BoolType: "BOOL",
    msgspec.inspect.IntType: "INTEGER",
    msgspec.inspect.FloatType: "NUMBER",
    msgspec.inspect.VarTupleType: "LIST",
    msgspec.inspect.ListType: "LIST",
}


@dataclass(frozen=True, slots=True)
class Option:
    """An option, an argument or a setting."""

    name: str
    """Of the parameter or field."""
    flag: str
    """`--max-queue`; of an argument, `IMAGES`."""
    type: Any
    kind: str
    """The placeholder of the value: `INTEGER`, `NUMBER`, `PATH`, `TEXT`, `LIST`, `BOOL` or `CHOICE`."""
    bounds: str
    """The bounds of a number; else empty."""
    choices: tuple[str, ...]
    default: Any
    topic: str
    description: str
    """In one paragraph; may be empty."""
    variable: str | None
    is_argument: bool

    @property
    def summary(self) -> str:
        """The first sentence of the description."""
        return _SENTENCE_END.split(self.description, maxsplit=1)[0]

    @property
    def shown_default(self) -> str:
        """The default as text."""
        if self.default is None or self.default == ():
            return "none"
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return ",".join(map(str, self.default)) if isinstance(self.default, tuple) else str(self.default)

    def read(self, text: Any) -> Any:
        """The value that a text, or a list of texts, stands for.

        Raises:
            ValueError: for a text that stands for none; says what was expected.
        """
        if self.choices and text not in self.choices:
            raise ValueError(f"Expected one of {', '.join(self.choices)}, got {text!r}")
        return msgspec.convert(text, self.type, strict=False, dec_hook=path_of)


Command: TypeAlias = Callable[..., int | None]
Notice: TypeAlias = Callable[[Mapping[str, Any]], None]
"""Told of the values that a command is called with, by name."""


@dataclass(frozen=True, slots=True)
class Program:
    """A command that reads its words itself."""

    summary: str
    main: Callable[[Sequence[str], str], int | None]
    """Takes the words after its name, and the name for usage lines."""


@dataclass(frozen=True, slots=True)
class Group:
    """Commands by name, under topics."""

    summary: str
    topics: Mapping[str, Mapping[str, Command | Program | Group]]
    before: Command | None = None
    """Called with the options that stand before a command's name; a status other than None ends the program."""

    @property
    def commands(self) -> dict[str, Command | Program | Group]:
        """All of them by name."""
        return {name: command for topic in self.topics.values() for name, command in topic.items()}


@functools.cache
def options_of(declared: Any) -> tuple[Option, ...]:
    """The options of a function, or the fields of a struct."""
    struct = _struct_of(declared)
    if struct is not None:
        declared = struct
    hints = typing.get_type_hints(declared, include_extras=True)
    names = {} if struct is None else {each.name: each.encode_name for each in msgspec.structs.fields(struct)}
    return tuple(
        _option(names.get(each.name, each.name), each.default, hints[each.name])
        for each in inspect.signature(declared).parameters.values()
    )


def _struct_of(declared: Any) -> type[msgspec.Struct] | None:
    """The struct whose fields are the options: itself, or the only parameter of a function."""
    if isinstance(declared, type):
        return declared if issubclass(declared, msgspec.Struct) else None
    hints = [hint for name, hint in typing.get_type_hints(declared).items() if name != "return"]
    return _struct_of(hints[0]) if len(hints) == 1 and isinstance(hints[0], type) else None


def parser(
    prog: str, description: str, options: Sequence[Option], *, epilog: str = "", switches_take_values: bool = False
) -> argparse.ArgumentParser:
    """A parser that gives a text, or a list of texts, for each option that is given.

    Args:
        prog: the command's name in usage lines.
        description: for `--help`.
        options: what the command takes.
        epilog: the end of `--help`.
        switches_take_values: whether `--switch false` is understood, as well as `--switch`.
    """
    arguments = "".join(f" {each.flag}" for each in options if each.is_argument)
    made = argparse.ArgumentParser(
        prog, f"{prog} [OPTIONS]{arguments}", description, epilog, allow_abbrev=False, formatter_class=_Help,
        argument_default=argparse.SUPPRESS, add_help=False,
    )  # fmt: skip
    made.add_argument("-h", "--help", action=_ShowHelp, nargs=0, help="Show this message and exit.")
    topics: dict[str, Any] = {"": made}
    for option in options:
        if option.topic not in topics:
            topics[option.topic] = made.add_argument_group(option.topic)
        how: dict[str, Any] = {"help": _help(option).replace("%", "%%")}
        if option.is_argument:
            nargs = None if option.default is REQUIRED else "?"
            if option.kind == "LIST":
                nargs = "+" if option.default is REQUIRED else "*"
            topics[option.topic].add_argument(option.name, metavar=option.flag, nargs=nargs, **how)
            continue
        if option.kind == "BOOL":
            how |= {"nargs": "?"} if switches_take_values else {"action": "store_const"}
            how["const"] = "true"
        if option.kind == "LIST" and not switches_take_values:
            how["action"] = "append"
        if option.kind != "BOOL" or switches_take_values:
            how["metavar"] = "TEXT" if how.get("action") == "append" else _metavar(option)
        topics[option.topic].add_argument(option.flag, dest=option.name, **how)
    return made


def call(command: Command, words: Sequence[str], prog: str, notice: Notice | None = None) -> int:
    """Run a command with the options in these words, and give its exit status.

    Raises:
        SystemExit: 0 after `--help`, 2 for a wrong command line, which is explained.
    """
    options = options_of(command)
    reader = parser(prog, inspect.cleandoc(command.__doc__ or ""), options)
    return _called(command, options, words, reader, notice) or 0


def run(group: Group, words: Sequence[str], prog: str, notice: Notice | None = None) -> int:
    """Run the command that the first words name, and give its exit status.

    Raises:
        SystemExit: as `call`.
    """
    options = () if group.before is None else options_of(group.before)
    reader = parser(f"{prog}", group.summary, options, epilog=_listing(group, prog))
    place = next((at for at, word in enumerate(words) if word in group.commands), len(words))
    if group.before is not None:
        status = _called(group.before, options, words[:place], reader)
        if status is not None:
            return status
    else:
        reader.parse_args(words[:place])
    if place == len(words):
        reader.print_help(sys.stderr)
        return USAGE_STATUS
    prog, rest = f"{prog} {words[place]}", words[place + 1 :]
    match group.commands[words[place]]:
        case Group() as inner:
            return run(inner, rest, prog, notice)
        case Program(_, main):
            return main(rest, prog) or 0
        case command:
            return call(command, rest, prog, notice)


def _called(
    command: Command,
    options: Sequence[Option],
    words: Sequence[str],
    reader: argparse.ArgumentParser,
    notice: Notice | None = None,
) -> int | None:
    given, values = vars(reader.parse_args(words)), dict[str, Any]()
    for option in options:
        text = given.get(option.name, os.environ.get(option.variable or ""))
        if text is None or text == []:  # `*` gives an empty list
            if option.default is REQUIRED:
                reader.error(f"missing {option.flag}")
            continue
        try:
            values[option.name] = option.read(text)
        except ValueError as error:  # msgspec's errors are such
            reader.error(f"{option.flag}: {error}")
    if notice is not None:
        notice(values)
    struct = _struct_of(command)
    return command(**values) if struct is None else command(struct(**values))


def walk(group: Group, prog: str) -> Iterator[tuple[str, Command | Program]]:
    """Every command below a group by the words that call it."""
    for name, command in group.commands.items():
        if isinstance(command, Group):
            yield from walk(command, f"{prog} {name}")
        else:
            yield f"{prog} {name}", command


def path_of(kind: type, value: object) -> Path:
    """Convert paths, which msgspec cannot read itself; `~` is a home folder.

    An empty path is an error, because an unset variable in a template must not mean the working folder.
    """
    # msgspec adds the key to the message of a ValueError.
    if kind is not Path or not isinstance(value, str | Path):
        raise ValueError(f"Expected `{kind.__name__}`, got `{type(value).__name__}`")
    if value == "":
        raise ValueError("Expected a path, got an empty text")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:  # ~somebody who has no home here
        raise ValueError(f"{value}: {error}") from None


def summary_of(command: Command | Program | Group) -> str:
    """What a command is for, in one paragraph."""
    text = command.summary if isinstance(command, Program | Group) else inspect.cleandoc(command.__doc__ or "")
    return " ".join(text.split("\n\n")[0].split())


def _option(name: str, default: Any, hint: Any) -> Option:
    metas = list(_metas(hint))
    extra = {key: value for meta in metas for key, value in (meta.extra or {}).items()}
    described = _bare(msgspec.inspect.type_info(hint))
    is_argument = "argument" in extra
    flag = name.upper() if is_argument else extra.get("name") or f"--{name.rstrip('_').replace('_', '-')}"
    choices = tuple(_choices(hint))
    kind = "CHOICE" if choices else _KINDS.get(type(described), "TEXT")
    if isinstance(described, msgspec.inspect.CustomType) and described.cls is Path:
        kind = "PATH"
    return Option(
        name=name,
        flag=flag,
        type=hint,
        kind=kind,
        bounds=_bounds(described),
        choices=choices,
        default=default,
        topic=next((meta.title for meta in metas if meta.title), ""),
        description=next((" ".join(meta.description.split()) for meta in metas if meta.description), ""),
        variable=extra.get("variable"),
        is_argument=is_argument,
    )


def _metas(hint: Any) -> Iterator[msgspec.Meta]:
    """Every `Meta` of a type, the outermost first."""
    if typing.get_origin(hint) is typing.Annotated:
        yield from (mark for mark in reversed(hint.__metadata__) if isinstance(mark, msgspec.Meta))
        yield from _metas(hint.__origin__)
    elif isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        for member in typing.get_args(hint):
            yield from _metas(member)


def _choices(hint: Any) -> Iterator[str]:
    """The texts that are allowed, in the order of the declaration, which msgspec does not keep."""
    if typing.get_origin(hint) is typing.Annotated:
        yield from _choices(hint.__origin__)
    elif typing.get_origin(hint) is Literal:
        yield from map(str, typing.get_args(hint))
    elif isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        for member in typing.get_args(hint):
            yield from _choices(member)
    elif isinstance(hint, type) and issubclass(hint, str) and hasattr(hint, "__members__"):
        yield from map(str, hint)  # type: ignore[call-overload]


def _bare(described: msgspec.inspect.Type) -> msgspec.inspect.Type:
    """The type without its descriptions and None."""
    if isinstance(described, msgspec.inspect.Metadata):
        return _bare(described.type)
    if isinstance(described, msgspec.inspect.UnionType):
        return _bare(next(t for t in described.types if not isinstance(t, msgspec.inspect.NoneType)))
    return described


def _bounds(described: msgspec.inspect.Type) -> str:
    """The bounds of a number as text; empty for other types."""
    if not isinstance(described, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        return ""
    low = f"at least {described.ge:,}" if described.ge is not None else ""
    low = f"more than {described.gt:,g}" if described.gt is not None else low
    high = f"at most {described.le:,}" if described.le is not None else ""
    high = f"less than {described.lt:,g}" if described.lt is not None else high
    return ", ".join(word for word in (low, high) if word).replace(".0,", ",").removesuffix(".0")


def _metavar(option: Option) -> str:
    choices = "|".join(option.choices)
    return choices if choices and len(choices) <= LONGEST_METAVAR else option.kind


def _help(option: Option) -> str:
    """The first sentence, the choices that the placeholder does not show, bounds, default and variable."""
    said = [option.summary]
    if option.choices and _metavar(option) == option.kind:
        said.append(f"One of {', '.join(option.choices)}.")
    stated = "" if option.default in (None, REQUIRED, False, ()) else f"default: {option.shown_default}"
    facts = "; ".join(filter(None, (option.bounds, stated, option.variable)))
    return " ".join(filter(None, (*said, facts and f"[{facts}]")))


class _ShowHelp(argparse.Action):
    """Prints the help; argparse's own action drops the error of an output without a reader."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(parser.format_help(), end="")  # noqa: T201
        parser.exit()


class _Help(argparse.RawDescriptionHelpFormatter):
    """Option and description side by side, as wide as the terminal."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=min(shutil.get_terminal_size().columns, 120))


def _listing(group: Group, prog: str) -> str:
    """The commands of a group, for the end of its `--help`."""
    width = max(map(len, group.commands))
    lines = list[str]()
    for topic, commands in group.topics.items():
        lines += [f"{topic or 'commands'}:"]
        lines += [f"  {name:{width}}  {summary_of(command)}" for name, command in commands.items()] + [""]
    return "\n".join([*lines, f"`{prog} COMMAND --help` explains a command."])
