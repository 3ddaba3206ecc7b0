"""What the files of edge/deploy say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
KEY = "a-key-that-was-filled-in"
DEPLOY = ROOT / "edge" / "deploy"


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (instruction, arguments), comments dropped and continued lines joined."""
    text = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", " ", "\n".join(lines))
    return [(name, rest.strip()) for name, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


def kubernetes() -> dict[str, Any]:
    """The manifest's objects by kind."""
    documents = list(yaml.safe_load_all((DEPLOY / "k3s.yaml").read_text(encoding="utf-8")))
    return {document["kind"]: document for document in documents}


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = kubernetes()["DaemonSet"]["spec"]["template"]["spec"]
    return spec
