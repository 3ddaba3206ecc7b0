"""The reference pages, made from the code: `python -m hawkvision.cli.reference docs/reference`.

Settings come from where they are declared, commands from their own parsers, the API from its OpenAPI document and
metrics from the registries that `/metrics` shows.
"""

from __future__ import annotations

import inspect
import json
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup
from typer.models import ArgumentInfo, OptionInfo

from hawkvision.core.command_line import Option

MADE_BY: Final = "<!-- Made by `python -m hawkvision.cli.reference docs/reference`; do not edit. -->"


def settings_page() -> str:
    """Every setting of both servers."""
    from hawkvision.core.settings.config import DatacenterConfig, EdgeConfig
    from hawkvision.core.settings.load import SECTIONS, settings_of

    lines = [
        "# Settings",
        "",
        MADE_BY,
        "",
        "A setting comes from the command line, else from a variable, else from the TOML file given with `--config`, "
        "else from its default. `port` of an edge node is `--port`, `HAWKVISION_EDGE_PORT`, or `port` in the section "
        "`[edge]`.",
    ]
    for kind, title in ((EdgeConfig, "Edge node"), (DatacenterConfig, "Datacenter tier")):
        section, prefix = SECTIONS[kind]
        lines += ["", f"## {title}", "", f"Section `[{section}]`, variables `{prefix}*`."]
        topics: dict[str, list[Option]] = {}
        for setting in settings_of(kind):
            topics.setdefault(setting.topic, []).append(setting)
        for topic, settings in topics.items():
            rows = (
                (f"`{s.name}`", _values(s.kind, s.choices, s.bounds), f"`{s.shown_default}`", s.description)
                for s in settings
            )
            lines += ["", f"### {topic}", "", *_table(("setting", "values", "default", "meaning"), rows)]
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """Every command with its arguments and options."""
    lines = ["# Command line", "", MADE_BY, "", "Every command explains itself with `--help`."]
    for name, command in commands():
        lines += ["", f"## `{name}`", "", _escaped(" ".join((command.help or "").split("\n\n")[0].split()))]
        rows = list(_parameters(name, command))
        if rows:
            lines += ["", *_table(("option", "value", "meaning"), rows)]
        if name in SETTINGS_OF:
            lines += ["", f"And every [setting](settings.md#{SETTINGS_OF[name]}) as an option."]
    return "\n".join(lines) + "\n"


def api_page() -> str:
    """The HTTP API of an edge node."""
    from edge.servers import openapi
    from edge.servers.shared.request_fields import FIELDS
    from hawkvision.tasks.registry import installed_kinds

    document = openapi.document()
    schemas, kinds = document["components"]["schemas"], installed_kinds()
    lines = ["# HTTP API of an edge node", "", MADE_BY, "", document["info"]["description"], ""]
    lines += ["A running node shows this at `/docs`, and as OpenAPI at `/openapi.json`."]
    paths = [
        (f"`{method.upper()}`", f"`{path}`", described["summary"])
        for path, methods in document["paths"].items()
        for method, described in methods.items()
        if method != "parameters"
    ]
    lines += ["", "## Paths", "", *_table(("method", "path", "what for"), paths)]
    lines += ["", "## Fields of `POST /v1/infer` and its typed forms", ""]
    lines += [document["paths"]["/v1/infer"]["post"]["description"], ""]
    fields = [
        (f"`{f.name}`", _allowed(f.schema, schemas), _code(f.schema.get("default")), f.description)
        for f in FIELDS.values()
    ]
    lines += _table(("field", "values", "default", "meaning"), fields)
    lines += ["", "## Answer", "", "The fields of every answer, and beside them those of its kind of task."]
    predictions = {kind.prediction.json_type().__name__: kind for kind in kinds.values()}
    for name, schema in schemas.items():
        if "properties" not in schema or name in ("Error", "InferHead", "InputTensor", "WantedOutput"):
            continue
        lines += ["", f"### {name}", "", schema.get("description", ""), ""]
        rows = [
            (f"`{field}`", _allowed(described, schemas), _escaped(described.get("description", "")))
            for field, described in schema["properties"].items()
        ]
        lines += _table(("field", "values", "meaning"), rows)
        if name in predictions and (example := openapi.example_answer(predictions[name])) is not None:
            lines += ["", f"An answer of kind `{predictions[name].name}`:", ""]
            lines += ["```json", json.dumps(example, indent=2, ensure_ascii=False), "```"]
    lines += ["", "## Errors", "", 'Always `{"error": …, "code": …}`.', ""]
    lines += _table(("status", "meaning"), [(f"`{status}`", text) for status, text in openapi.ERRORS.items()])
    return "\n".join(lines) + "\n"


def metrics_page() -> str:
    """The metrics of both servers."""
    from hawkvision.core.metrics import EdgeMetrics
    from hawkvision.datacenter.servers.metrics import DatacenterMetrics

    lines = ["# Metrics", "", MADE_BY, "", "`GET /metrics` shows them for Prometheus. Features that are off, such as"]
    lines[-1] += " datagrams, TLS or an FPGA, have none."
    for title, registry in (("Edge node", EdgeMetrics().registry), ("Datacenter tier", DatacenterMetrics().registry)):
        families = sorted(registry.collect(), key=lambda family: family.name)
        rows = [
            (f"`{family.name}{'_total' if family.type == 'counter' else ''}`", family.type, family.documentation)
            for family in families
        ]
        lines += ["", f"## {title}", "", *_table(("metric", "kind", "meaning"), rows)]
    return "\n".join(lines) + "\n"


PAGES: Final[dict[str, Callable[[], str]]] = {
    "settings.md": settings_page,
    "cli.md": cli_page,
    "api.md": api_page,
    "metrics.md": metrics_page,
}
SETTINGS_OF: Final = {
    "hawkvision edge up": "edge-node",
    "hawkvision dc up": "datacenter-tier",
    "hawkvision dc deploy": "datacenter-tier",
}
"""Commands that take all settings of a server, and where these are described."""


def commands() -> Iterator[tuple[str, TyperCommand]]:
    """Every command by the words that call it; those of `hawkvision load` are the load generator's own."""
    from fpga.cli import app as fpga_app
    from fpga.offload.cli import app as plan_app
    from hawkvision.cli import app

    elsewhere: dict[str, Any] = {
        "hawkvision fpga": typer.main.get_command(fpga_app),
        "hawkvision plan": typer.main.get_command(plan_app),
    }

    def below(name: str, command: Any) -> Iterator[tuple[str, TyperCommand]]:
        command = elsewhere.get(name, command)
        if isinstance(command, TyperGroup):
            for word, inner in command.commands.items():
                yield from below(f"{name} {word}", inner)
        else:
            yield name, command

    yield from below("hawkvision", typer.main.get_command(app))


def _parameters(name: str, command: TyperCommand) -> Iterator[tuple[str, str, str]]:
    """What a command takes, as (words, value, meaning); without hidden options, and settings, which have a page.

    Read from the signature of the command's function, which is ours, not from what Typer makes of it.
    """
    assert command.callback is not None
    for parameter in inspect.signature(command.callback, eval_str=True).parameters.values():
        if typing.get_origin(parameter.annotation) is not typing.Annotated:
            continue  # the context
        of, info = typing.get_args(parameter.annotation)[:2]
        is_setting = name in SETTINGS_OF and info.rich_help_panel is not None
        if not info.hidden and not is_setting:
            variable = f" (`{info.envvar}`)" if info.envvar else ""
            meaning = _escaped(info.help or "") + variable
            yield _words(parameter.name, info), _taken(of, info, parameter.default), meaning


def _words(name: str, info: OptionInfo | ArgumentInfo) -> str:
    """How an option or argument is written."""
    if isinstance(info, ArgumentInfo):
        return f"`{name.upper()}`"
    written = [word for word in (info.default, *(info.param_decls or ())) if isinstance(word, str)]
    return ", ".join(f"`{word}`" for word in written or [f"--{name.replace('_', '-')}"])


def _taken(of: Any, info: OptionInfo | ArgumentInfo, default: Any) -> str:
    """What stands for a value, its bounds and its default."""
    options = [kind for kind in typing.get_args(of) if kind is not type(None)]
    is_optional = type(None) in typing.get_args(of)
    kind = options[0] if is_optional else of
    if kind is bool:
        return ""
    if typing.get_origin(kind) is list:
        kind = typing.get_args(kind)[0]
    choices = "|".join(map(str, typing.get_args(kind)))
    shown = info.metavar or choices or {int: "INTEGER", float: "NUMBER", Path: "PATH"}.get(kind, "TEXT")
    low = "" if info.min is None else f"from {info.min:g}"
    high = "" if info.max is None else f"to {info.max:g}"
    said = "" if default in (None, inspect.Parameter.empty) else f"; default {default}"
    return _escaped(" ".join(filter(None, (shown, low, high))) + said)


def _values(kind: str, choices: Iterable[str], bounds: str) -> str:
    return ", ".join(f"`{choice}`" for choice in choices) or " ".join(filter(None, (kind.lower(), bounds)))


def _allowed(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> str:
    """The values that a JSON schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(_allowed(each, schemas) for each in schema["anyOf"])
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return _allowed(schemas[name], schemas) if "enum" in schemas[name] else f"[{name}](#{name.lower()})"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        items = schema.get("items") or next(iter(schema["prefixItems"]))
        return f"list of {_allowed(items, schemas)}"
    noun = {"integer": "whole number", "string": "text", "boolean": "`true`, `false`"}.get(
        schema.get("type", ""), schema.get("type", "any")
    )
    low = f"from {schema['minimum']:g}" if "minimum" in schema else ""
    low = f"above {schema['exclusiveMinimum']:g}" if "exclusiveMinimum" in schema else low
    high = f"to {schema['maximum']:,g}" if "maximum" in schema else ""
    longest = f"of at most {schema['maxLength']} characters" if "maxLength" in schema else ""
    return " ".join(filter(None, (noun, low, high, longest)))


def _code(value: object) -> str:
    return "" if value is None else f"`{value}`"


def _escaped(text: str) -> str:
    """Text without Rich's markup, for a cell of a table."""
    return inspect.cleandoc(text).replace("\\[", "[").replace("|", "\\|").replace("\n", " ")


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    written = [titles, tuple("---" for _ in titles), *rows]
    return [f"| {' | '.join(row)} |" for row in written]


def write(folder: Path) -> None:
    """Write all pages into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
