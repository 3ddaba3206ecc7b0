"""Settings of Ray Serve's scaling that contradict each other are refused when they are read."""

from __future__ import annotations

import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.core.settings.load import load_config


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"min_replicas": "3"}, r"dc\.min_replicas = 3: expected at most dc\.max_replicas = 1"),
        (
            {"max_replicas": "4", "target_ongoing_requests": "40"},
            r"dc\.target_ongoing_requests = 40: expected at most dc\.max_ongoing_requests = 32",
        ),
        ({"max_replicas_per_node": "0"}, r"Expected `int` >= 1 - at `\$\.max_replicas_per_node`"),
        ({"num_cpus": "0"}, r"Expected `float` > 0.0 - at `\$\.num_cpus`"),
    ],
)
def test_a_contradiction_is_named(settings: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_config(
            DatacenterConfig, environ={f"HAWKVISION_DC_{key.upper()}": value for key, value in settings.items()}
        )


def test_a_target_does_not_matter_where_the_number_of_replicas_is_fixed() -> None:
    environ = {"HAWKVISION_DC_TARGET_ONGOING_REQUESTS": "40", "HAWKVISION_DC_MAX_ONGOING_REQUESTS": "1"}
    assert load_config(DatacenterConfig, environ=environ).target_ongoing_requests == 40.0
