"""Settings of features: found by entry points, read like a server's own, and refused when two declare the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import DatacenterConfig, EdgeConfig
from hawkvision.core.settings.load import load_config, read_command_line
from hawkvision.core.settings.package_settings import settings_groups

FEATURE = """
from typing import Literal
import msgspec
from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.package_settings import SettingsGroup

class Lamp(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename=lambda name: f"lamp_{name}"):
    colour: Literal["red", "green"] = "red"
    watts: float = 1.0
    names: tuple[str, ...] = ()

def check(config, lamp):
    if lamp.watts > config.port:
        raise ConfigError("edge.lamp_watts is beyond edge.port")

EDGE = SettingsGroup("edge", Lamp, check)
NONE = 3
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Installs a distribution with these entry points of `hawkvision.settings`, for one test."""
    (tmp_path / "lamp_feature.py").write_text(FEATURE)
    info = tmp_path / "lamp-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: lamp\nVersion: 1.0\n")

    def points(**named: str) -> None:
        lines = [f"{name} = lamp_feature:{value}" for name, value in named.items()]
        (info / "entry_points.txt").write_text("\n".join(["[hawkvision.settings]", *lines, ""]))
        monkeypatch.syspath_prepend(tmp_path)
        settings_groups.cache_clear()

    yield points
    settings_groups.cache_clear()


def test_settings_of_a_feature_come_from_file_environment_and_command_line(install: Install, tmp_path: Path) -> None:
    install(lamp="EDGE")
    file = tmp_path / "node.toml"
    file.write_text('[edge]\nlamp_colour = "green"\nlamp_watts = 2.0\n')
    from lamp_feature import Lamp  # type: ignore[import-not-found]

    assert EdgeConfig().feature(Lamp) == Lamp()

    config = load_config(
        EdgeConfig, file, {"lamp_names": ("a",)}, {"HAWKVISION_EDGE_LAMP_WATTS": "3", "HAWKVISION_EDGE_PORT": "9"}
    )
    assert config.feature(Lamp) == Lamp(colour="green", watts=3.0, names=("a",))
    assert config.port == 9
    parsed = read_command_line(EdgeConfig, ["--lamp-colour", "green", "--lamp-names", "a, b"], "edge", "")
    assert parsed.feature(Lamp) == Lamp(colour="green", names=("a", "b"))


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"LAMP_COLOUR": "blue"}, r"Expected one of red, green, got 'blue' - at `\$\.lamp_colour`"),
        ({"LAMP_WATTS": "much"}, r"HAWKVISION_EDGE_\*.*\$\.lamp_watts"),
        ({"LAMP_WATTS": "2", "PORT": "1"}, "lamp_watts is beyond edge.port"),
        ({"LAMP_SIZE": "2"}, "unknown field `lamp_size`"),
        ({"FEATURES": "x"}, "unknown field `features`"),
    ],
)
def test_mistakes_in_settings_of_features_are_named(install: Install, environ: dict[str, str], says: str) -> None:
    install(lamp="EDGE")
    with pytest.raises(ConfigError, match=says):
        load_config(EdgeConfig, environ={f"HAWKVISION_EDGE_{name}": value for name, value in environ.items()})


def test_a_feature_of_one_server_is_unknown_to_the_other(install: Install) -> None:
    install(lamp="EDGE")
    with pytest.raises(ConfigError, match="unknown field `lamp_watts`"):
        load_config(DatacenterConfig, environ={"HAWKVISION_DC_LAMP_WATTS": "1"})


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ({"lamp": "EDGE", "light": "EDGE"}, "another feature declares lamp_colour, lamp_names, lamp_watts"),
        ({"lamp": "NONE"}, "entry point lamp = lamp_feature:NONE.*expected a SettingsGroup, got int"),
        ({"lamp": "MISSING"}, "entry point lamp = lamp_feature:MISSING"),
    ],
)
def test_features_that_cannot_be_used_are_named(install: Install, points: dict[str, str], says: str) -> None:
    install(**points)
    with pytest.raises(ConfigError, match=says):
        load_config(EdgeConfig, environ={})
