"""Commands that messages advise work as pasted: they have the folders that the user gave."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hawkvision.cascade.certification.profile_files import load_profile
from hawkvision.cli import COMMANDS
from hawkvision.core import advice
from hawkvision.core.command_line import options_of, walk
from hawkvision.core.errors import ArtifactError, ManifestError
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.settings.load import load_config, settings_of
from hawkvision.models.artifacts import load_verified
from hawkvision.models.manifest import artifact_path


def test_a_command_is_quoted_and_has_what_was_given() -> None:
    assert advice.advise("models build", "--task", "my task") == "hawkvision models build --task 'my task'"
    advice.remember(models_dir=Path("/m m"), cache_dir=Path("/c"), profile=Path("/p.json"))
    assert advice.advise("models build", "tiny") == "hawkvision models build tiny --models-dir '/m m' --cache-dir /c"
    assert advice.advise("certify").endswith("--profile /p.json --models-dir '/m m' --cache-dir /c")
    assert advice.advise("models build", cache_dir=None) == "hawkvision models build --models-dir '/m m'"
    advice.remember(models_dir=None)
    assert advice.advise("models build") == "hawkvision models build --cache-dir /c"


@pytest.mark.parametrize("command", advice.OPTIONS_OF)
def test_every_command_takes_the_options_that_are_added_to_it(command: str) -> None:
    if command == "edge up":  # reads its words itself, one option per setting
        taken = {option.flag for option in settings_of(EdgeConfig)}
    else:
        taken = {option.flag for option in options_of(dict(walk(COMMANDS, ""))[f" {command}"])}
    assert {f"--{name.replace('_', '-')}" for name in advice.OPTIONS_OF[command]} <= taken


def test_a_missing_model_is_built_where_it_was_looked_for(tmp_path: Path) -> None:
    load_config(EdgeConfig, overrides={"models_dir": tmp_path / "zoo", "cache_dir": tmp_path}, environ={})
    with pytest.raises(ArtifactError) as caught:
        load_verified(artifact_path(tmp_path, "imagenet", "small"), "0" * 64)
    advised = re.search(r"`(.*)`", str(caught.value))
    assert advised is not None
    words = shlex.split(advised[1])
    assert words[:5] == ["hawkvision", "models", "build", "--task", "imagenet"]
    assert words[5:] == ["small", "--models-dir", str(tmp_path / "zoo"), "--cache-dir", str(tmp_path)]


def test_a_missing_profile_is_measured_with_the_folders_that_were_given(tmp_path: Path) -> None:
    advice.remember(models_dir=tmp_path)
    with pytest.raises(ManifestError, match=rf"`hawkvision calibrate --task t --data IMAGES --models-dir {tmp_path}`"):
        load_profile(tmp_path / "t" / "profile.json")


def test_a_command_of_its_own_repeats_its_options(tmp_path: Path) -> None:
    """The whole way, in a process: options are read, a file is missing, and what is advised has the options."""
    command = [sys.executable, "-m", "hawkvision.cli", "models", "verify", "--cache-dir", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 1
    assert re.search(rf"`hawkvision models build --task imagenet \w+ --cache-dir {tmp_path}`", ran.stderr)
