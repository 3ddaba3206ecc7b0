"""What a tier logs: lines of one format, those of Ray's processes among them."""

from __future__ import annotations

import json
import re

import pytest

from hawkvision.core import __version__
from tests.hawkvision.datacenter.conftest import Running, image
from tests.hawkvision.datacenter.servers.test_service import TRACE, ask

pytestmark = pytest.mark.slow


def lines(service: Running) -> list[dict[str, object]]:
    assert service.log is not None
    whole = service.log.read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def test_a_tiers_lines_are_json_and_its_replicas_are_among_them(service: Running) -> None:
    reply = ask(service, image(), **{"X-Request-Id": "mine", "traceparent": TRACE})
    assert (reply.status, reply.headers["x-request-id"]) == (200, "mine")
    forged = ask(service, image(), **{"X-Request-Id": "not sane", "traceparent": TRACE})
    assert forged.headers["x-request-id"] == TRACE.split("-")[1]
    page = ask(service, path="/metrics").body.decode()
    said = lines(service)
    ready = [line for line in said if "replica ready" in str(line["message"])]
    assert [(line["level"], line["logger"], line["message"]) for line in ready] == [
        ("INFO", "hawkvision.datacenter", "replica ready: medium (noop), small (noop)")
    ]
    assert all({"time", "level", "logger", "request_id", "trace_id", "message"} <= set(line) for line in said)
    described = f'hawkvision_datacenter_build_info{{backend="noop",task="shapes",version="{__version__}"}} 1.0'
    assert described in page.splitlines()
    assert re.search(r"(?m)^process_resident_memory_bytes [1-9]", page)
