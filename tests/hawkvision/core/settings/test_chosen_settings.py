"""Settings that travel to another process: as JSON, without those at their defaults."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hawkvision.core.settings.config import DatacenterConfig, EdgeConfig
from hawkvision.core.settings.load import chosen_settings, load_config


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        (DatacenterConfig, {}),
        (
            DatacenterConfig,
            {
                "tasks": ["imagenet", "cifar10"],
                "cache_dir": "/models",
                "api_key": "a-key-of-some-length",
                "target_ongoing_requests": 2.5,
                "datagram_port": 0,
                "ray_network": "shared",
            },
        ),
        (EdgeConfig, {"datacenter_url": "http://10.0.0.1:8090", "onnx_providers": ["CPUExecutionProvider"]}),
    ],
)
def test_settings_are_the_same_after_the_journey(kind: Any, given: dict[str, Any]) -> None:
    config = load_config(kind, overrides=given, environ={})
    received = json.loads(json.dumps(chosen_settings(config)))
    assert received.keys() <= given.keys()
    assert load_config(kind, overrides=received, environ={}) == config
