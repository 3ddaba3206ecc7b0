"""Manifests as TOML text that `hawkvision.models.manifest.parse_manifest` reads."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from hawkvision.core.errors import ManifestError
from hawkvision.models.input_spec import DEFAULT_KIND, InputSpec, input_facts
from hawkvision.models.manifest import Manifest


def format_manifest(manifest: Manifest, header: str = "") -> str:
    """The manifest as TOML: scalars first, then tables; `header` lines become comments."""
    fields: dict[str, Any] = msgspec.to_builtins(manifest)
    fields["kind"] = None if manifest.kind == DEFAULT_KIND else manifest.kind
    lines = [f"# {line}".rstrip() for line in header.splitlines()]
    heads = ("format", "task", "kind", "view_of", "labels", "labels_sha256", "profile_sha256", "classes")
    lines += [f"{key} = {_value(fields[key])}" for key in heads if fields[key] is not None]
    lines += ["", "[cascade]", *_table(fields["cascade"])]
    if fields["options"]:
        lines += ["", "[options]", *_table(fields["options"])]
    if fields["training"] is not None:
        lines += ["", "[training]", *_table(fields["training"])]
    for variant in () if manifest.view_of else fields["variants"]:
        del variant["source"]["kind"]  # its keys tell
        variant |= {"input": input_facts(msgspec.convert(variant["input"], InputSpec))}
        _leave_out(variant, {"decoder": "logits", "decoder_options": {}})
        lines += ["", "[[variants]]", *_table(variant)]
    for ensemble in fields["ensembles"]:
        _leave_out(ensemble, {"weights": ()})
        lines += ["", "[[ensembles]]", *_table(ensemble)]
    return "\n".join(lines) + "\n"


def with_profile(text: str, sha256: str) -> str:
    """A manifest's text that pins another profile; comments and all else stay as they are.

    Raises:
        ManifestError: if it pins none.
    """
    changed, times = re.subn(r'(?m)^profile_sha256 = "[0-9a-f]{64}"$', f'profile_sha256 = "{sha256}"', text)
    if times != 1:
        raise ManifestError('expected a line profile_sha256 = "..." of 64 digits in the manifest')
    return changed


def _leave_out(table: dict[str, Any], defaults: dict[str, Any]) -> None:
    for key, default in defaults.items():
        if table[key] == default:
            del table[key]


def _table(fields: dict[str, Any]) -> list[str]:
    return [f"{_key(key)} = {_value(value)}" for key, value in fields.items() if value is not None]


def _key(key: str) -> str:
    return key if re.fullmatch(r"[\w-]+", key, re.ASCII) else json.dumps(key)


def _value(value: Any) -> str:
    match value:
        case dict():
            return "{ " + ", ".join(_table(value)) + " }"
        case list() | tuple():
            return "[" + ", ".join(_value(item) for item in value) + "]"
        case bool() | str():
            return json.dumps(value)  # TOML's basic strings and booleans are JSON's
        case _:
            return repr(value)
