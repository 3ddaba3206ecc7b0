"""Reports as self-contained HTML pages: they load nothing, and text is escaped.

Needs Jinja2 (the extras `report` and `loadgen`).
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Iterable

import jinja2
from markupsafe import Markup

__all__ = ["Markup", "joined", "render"]


def render(package: str, template: str, **values: object) -> Markup:
    """A template of `package`'s folder `templates`; `base.html` and `tables.html` of this package may be used by it.

    Values are escaped, unless they are `Markup`.
    """
    return Markup(_environment(package).get_template(template).render(values))  # noqa: S704 - templates escape


def joined(parts: Iterable[str]) -> Markup:
    """Pieces of markup in a row."""
    return Markup("\n").join(part for part in parts if part)


def source(package: str, name: str) -> Markup:
    """A style sheet or a script from the folder `templates` of `package`."""
    environment = _environment(package)
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0])  # noqa: S704 - our own file


def script_hash(script: str) -> str:
    """The hash `sha256-…` by which a page's policy allows a script."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


@functools.cache
def _environment(package: str) -> jinja2.Environment:
    loader = jinja2.ChoiceLoader([jinja2.PackageLoader(package), jinja2.PackageLoader("hawkvision.reports")])
    return jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
