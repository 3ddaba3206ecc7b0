"""The reference pages, made from the code: `python -m hawkvision.cli.reference docs/reference`.

Settings come from where they are declared, commands from their own parsers, the API from its OpenAPI document,
metrics from the registries that `/metrics` shows, and the Python package from its docstrings.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import Enum
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from hawkvision.core.command_line import REQUIRED, Command, Option, Program, options_of, summary_of, walk

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
    """Every command with its arguments and options; those that `SHARED` commands take alike are described once."""
    described = {
        name: [(f"`{o.flag}`", _escaped(_value(o)), _escaped(_meaning(o))) for o in options_of(command)]
        for name, command in commands()
        if name not in SETTINGS_OF and not isinstance(command, Program)
    }
    uses = Counter(row for rows in described.values() for row in rows)
    shared = [row for row, count in uses.items() if count >= SHARED]
    lines = ["# Command line", "", MADE_BY, "", "Every command explains itself with `--help`."]
    lines += ["", "## Options of several commands", "", *_table(("option", "value", "meaning"), shared)]
    for name, command in commands():
        lines += ["", f"## `{name}`", "", _escaped(summary_of(command))]
        if name in SETTINGS_OF:
            lines += ["", f"Its options are `--config FILE` and every [setting](settings.md#{SETTINGS_OF[name]})."]
        rows = described.get(name, [])
        if own := [row for row in rows if row not in shared]:
            lines += ["", *_table(("option", "value", "meaning"), own)]
        if taken := [row[0] for row in rows if row in shared]:
            lines += ["", f"It also takes {', '.join(taken)}: see [above](#options-of-several-commands)."]
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


def python_page() -> str:
    """The public names of the package `hawkvision`: the client, what it answers and what it raises."""
    import hawkvision
    import hawkvision.client
    from hawkvision.client.asynchronous import ClientOptions
    from hawkvision.core.answer_json import AccuracyFields, AnswerFields
    from hawkvision.core.errors import HawkVisionError

    lines = ["# Python", "", MADE_BY, "", "All names are imported from `hawkvision`; its submodules are internal."]
    lines += ["", "## Client", "", *_markdown(hawkvision.client)]
    lines += ["", "### `Client(url, **options)`", "", *_markdown(hawkvision.AsyncClient.__init__)]
    lines += ["", *_table(("option", "type", "meaning"), _fields_of(ClientOptions, {}))]
    lines += [
        "",
        "`AsyncClient` takes the same options and has the same methods, as coroutines and asynchronous generators.",
    ]
    lines += [
        "`fields` are those [of a request](api.md#fields-of-post-v1infer-and-its-typed-forms), `encoding` and `color`."
    ]
    for name, method in vars(hawkvision.Client).items():
        if not name.startswith("_") and callable(method):
            described = method if name == "close" else getattr(hawkvision.AsyncClient, name)
            lines += ["", f"### `{_call(method)}`", "", *_markdown(described)]
    lines += [
        "",
        "## Answers",
        "",
        "The fields of a prediction are those of its kind of task in the [API](api.md#answer).",
    ]
    public = [each for name in hawkvision.__all__ if isinstance(each := getattr(hawkvision, name), type)]
    errors = [each for each in public if issubclass(each, HawkVisionError)]
    in_json = {hawkvision.Answer: AnswerFields, hawkvision.AccuracyGuarantee: AccuracyFields}
    for each in public:
        if each in errors or each in (hawkvision.Client, hawkvision.AsyncClient):
            continue
        lines += ["", f"### `{each.__name__}`", "", *_markdown(each), ""]
        if issubclass(each, Enum):
            lines.append(f"Values: {', '.join(f'`{member.value}`' for member in each)}.")
        else:
            known = {name: text for name, _, text in _fields_of(in_json[each], {})} if each in in_json else {}
            lines += _table(("field", "type", "meaning"), _fields_of(each, known))
    rows = [
        (f"`{e.__name__}`", f"`{e.mro()[1].__name__}`", f"{e.status}", f"`{e.code}`", " ".join(_markdown(e)))
        for e in errors
    ]
    lines += ["", "## Errors", "", "`status` and `code` are those of the reply; `message` is the text.", ""]
    return "\n".join(lines + _table(("error", "is a", "status", "code", "meaning"), rows)) + "\n"


PAGES: Final[dict[str, Callable[[], str]]] = {
    "settings.md": settings_page,
    "cli.md": cli_page,
    "api.md": api_page,
    "metrics.md": metrics_page,
    "python.md": python_page,
}
SETTINGS_OF: Final = {
    "hawkvision edge up": "edge-node",
    "hawkvision dc up": "datacenter-tier",
    "hawkvision dc deploy": "datacenter-tier",
}
"""Commands that take all settings of a server, and where these are described."""
SHARED: Final = 5
"""Commands from which on an option that means the same in all of them is described once."""


def commands() -> Iterator[tuple[str, Command | Program]]:
    """Every command by the words that call it; those of `hawkvision load` are the load generator's own."""
    from fpga.cli import COMMANDS as OF_FPGAS
    from hawkvision.cli import COMMANDS

    for name, command in walk(COMMANDS, "hawkvision"):
        if name == "hawkvision fpga":
            yield from walk(OF_FPGAS, name)
        else:
            yield name, command


def _call(method: Callable[..., Any]) -> str:
    """A method as it is called, with its types."""
    (written,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(method))).body
    assert isinstance(written, ast.FunctionDef)
    assert written.returns is not None
    arguments = ast.unparse(written.args).removeprefix("self").removeprefix(", ")
    return f"{written.name}({arguments}) -> {ast.unparse(written.returns)}"


def _fields_of(owner: type, known: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """The fields that a class declares: name, type, and what it or else `known` says of them."""
    (tree,) = ast.parse(inspect.getsource(owner)).body
    assert isinstance(tree, ast.ClassDef)
    for declared, below in pairwise([*tree.body, ast.Pass()]):
        if not isinstance(declared, ast.AnnAssign):
            continue
        name, kind = f"`{ast.unparse(declared.target)}`", declared.annotation
        text = known.get(name, "")
        match kind, below:
            case ast.Subscript(slice=ast.Tuple(elts=[kind, ast.Call(keywords=[described])])), _:
                text = ast.literal_eval(described.value)
            case _, ast.Expr(value=ast.Constant(value=str(text))):
                pass
        yield name, f"`{_escaped(ast.unparse(kind))}`", _escaped(inspect.cleandoc(text))


def _markdown(owner: object) -> list[str]:
    """A docstring as lines of Markdown: what it takes and raises becomes a list."""
    text, *lists = re.split(r"(?m)^(?=Args:|Raises:)", inspect.getdoc(owner) or "", maxsplit=1)
    listed = re.sub(r"(?m)^ {8}", "  ", re.sub(r"(?m)^ {4}(?=\S)", "- ", "".join(lists)))
    return [*text.splitlines(), *re.sub(r"(?m)^(\w+:)$", r"\1\n", listed).splitlines()]


def _value(option: Option) -> str:
    """What stands for a value, its bounds and its default."""
    if option.kind == "BOOL":
        return ""
    shown = "|".join(option.choices) or ("TEXT" if option.kind == "LIST" else option.kind)
    default = "" if option.default in (None, REQUIRED) else f"; default {option.default}"
    return " ".join(filter(None, (shown, option.bounds))) + default


def _meaning(option: Option) -> str:
    return option.description + (f" (`{option.variable}`)" if option.variable else "")


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
    """Text for a cell of a table."""
    return text.replace("|", "\\|").replace("\n", " ")


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
