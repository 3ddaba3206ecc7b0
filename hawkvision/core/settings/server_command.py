"""The command line of the servers in Typer: one option per setting, made from its declaration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand

from hawkvision.core.settings.descriptions import Setting, settings_of
from hawkvision.core.settings.load import ConfigT, section_of, structs_of
from hawkvision.core.settings.words import ParsedArguments

LONGEST_METAVAR: Final = 20
"""Characters; a longer placeholder would leave too little room for descriptions."""
HELP_OPTIONS: Final = {"help_option_names": ["-h", "--help"]}


class ServerCommand:
    """A command that takes every setting of a server as an option, `--config FILE`, and perhaps a few more."""

    def __init__(
        self, kind: type[ConfigT], prog: str, description: str, more: Mapping[str, tuple[str, str]] | None = None
    ) -> None:
        """Make the command; nothing is read yet.

        Args:
            kind: the settings.
            prog: the command's name in usage lines.
            description: for `--help`.
            more: further options by name, each with the placeholder of its value and its description.
        """
        self.prog = prog
        self._parsed: list[ParsedArguments] = []
        self._settings = settings_of(*structs_of(kind))
        self._more = dict(more or {})
        section, prefix = section_of(kind)
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
        description = (
            f"{description}\n\nEach setting is an option, a variable {prefix}NAME, or a key of the section "
            f"[{section}] of a TOML file; the command line wins over variables, and these over the file."
        ).replace("[", "\\[")

        def taken(**given: Any) -> None:
            self._parsed.append(self._sorted(given))

        taken.__signature__ = inspect.Signature(self._parameters(section))  # type: ignore[attr-defined]
        app.command(help=description, context_settings=HELP_OPTIONS)(taken)
        command = typer.main.get_command(app)
        assert isinstance(command, TyperCommand)
        self.command = command

    def parse(self, words: Sequence[str]) -> ParsedArguments:
        """Read a command line.

        Raises:
            SystemExit: 0 for `--help`, 2 for unknown options.
        """
        self._parsed.clear()
        try:
            self.command.main(args=self._with_values(words), prog_name=self.prog)
        except SystemExit:
            if not self._parsed:
                raise
        return self._parsed.pop()

    def _parameters(self, section: str) -> list[inspect.Parameter]:
        file = f"TOML file with a section \\[{section}]."
        parameters = [_parameter("config", typer.Option("--config", metavar="FILE", help=file), Path)]
        parameters += [
            _parameter(name, typer.Option(f"--{name.replace('_', '-')}", metavar=metavar, help=_plain(text)), str)
            for name, (metavar, text) in self._more.items()
        ]
        parameters += [_parameter(setting.name, _option(setting), str) for setting in self._settings]
        return parameters

    def _sorted(self, given: dict[str, Any]) -> ParsedArguments:
        config = given.pop("config")
        more = {name: given.pop(name) for name in self._more}
        return ParsedArguments(config, given, more)

    def _with_values(self, words: Sequence[str]) -> list[str]:
        """The words, with `true` after each switch without a value."""
        switches = {setting.option for setting in self._settings if setting.kind == "BOOL"}
        written: list[str] = []
        for place, word in enumerate(words):
            written.append(word)
            following = words[place + 1] if place + 1 < len(words) else "--"
            if word in switches and following.startswith("-"):
                written.append("true")
        return written


def _parameter(name: str, option: Any, of: type) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[of | None, option]
    )


def _option(setting: Setting) -> Any:
    """The option of a setting. Short choices are its placeholder; longer ones are listed in its description."""
    choices = "|".join(setting.choices)
    if len(choices) > LONGEST_METAVAR:
        choices = ""
    said = [setting.summary]
    if setting.choices and not choices:
        said.append(f"One of {', '.join(setting.choices)}.")
    said.append(f"[{'; '.join(filter(None, (setting.bounds, f'default: {setting.shown_default}')))}]")
    return typer.Option(
        setting.option,
        metavar=choices or setting.kind,
        help=_plain(" ".join(said)),
        rich_help_panel=setting.topic,
        show_default=False,
    )


def _plain(text: str) -> str:
    """The text with Rich's markup escaped."""
    return text.replace("[", "\\[")
