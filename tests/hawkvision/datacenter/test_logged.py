"""What a tier logs: lines of one format, those of Ray's processes among them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hawkvision import __version__
from hawkvision.process import ServerProcess, running
from tests.hawkvision.datacenter.conftest import picture
from tests.hawkvision.datacenter.test_service import TRACE, ask

pytestmark = pytest.mark.slow


def lines(tier: ServerProcess) -> list[dict[str, object]]:
    return [json.loads(line) for line in tier.output().splitlines()]


def test_a_tiers_lines_are_json_and_its_replicas_are_among_them(models: Path) -> None:
    words = ("--backend", "noop", "--variants", "medium", "--port", "0", "--log-format", "json", "--task", "shapes")
    with running("hawkvision.datacenter", *words, "--models-dir", str(models)) as tier:
        reply = ask(tier.url, picture(), **{"X-Request-Id": "mine", "traceparent": TRACE})
        assert (reply.status, reply.headers["x-request-id"]) == (200, "mine")
        forged = ask(tier.url, picture(), **{"X-Request-Id": "not sane", "traceparent": TRACE})
        assert forged.headers["x-request-id"] == TRACE.split("-")[1]
        page = ask(tier.url, path="/metrics").body.decode()
        assert tier.stop() == 0
    ready = [line for line in lines(tier) if "replica ready" in str(line["message"])]
    assert [(line["level"], line["logger"], line["message"]) for line in ready] == [
        ("INFO", "hawkvision.datacenter", "replica ready: medium (noop)")
    ]
    assert all({"time", "level", "logger", "request_id", "trace_id", "message"} <= set(line) for line in lines(tier))
    described = f'hawkvision_dc_build_info{{backend="noop",task="shapes",version="{__version__}"}} 1.0'
    assert described in page.splitlines()
    assert re.search(r"(?m)^process_resident_memory_bytes [1-9]", page)
