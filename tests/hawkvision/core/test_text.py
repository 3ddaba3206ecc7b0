"""Files that people write are read whatever their editor puts in front."""

from __future__ import annotations

import codecs
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fpga.compiler.folding import Folding, StageFolding, format_folding, parse_folding
from hawkvision.core.errors import ManifestError
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.core.settings.load import load_config
from hawkvision.core.text_files import decode_text
from hawkvision.models.manifest import load_labels, load_manifest, models_dir
from loadgen.network.profiles import FOLDER, load_profile
from loadgen.workload.arrivals import read_timestamps

MARKS = {"utf-8": codecs.BOM_UTF8, "utf-16-le": codecs.BOM_UTF16_LE, "utf-16-be": codecs.BOM_UTF16_BE}


@given(st.text().filter(lambda text: not text.startswith("\ufeff")), st.sampled_from(sorted(MARKS)))
def test_a_mark_says_how_the_text_is_encoded_and_is_no_part_of_it(text: str, encoding: str) -> None:
    assert decode_text(MARKS[encoding] + text.encode(encoding)) == text
    assert decode_text(text.encode()) == text


def test_settings_manifest_and_labels_may_begin_with_a_mark(tmp_path: Path) -> None:
    (tmp_path / "edge.toml").write_bytes(codecs.BOM_UTF8 + b"[edge]\r\nmax_queue = 127\r\n")
    assert load_config(EdgeConfig, tmp_path / "edge.toml", environ={}).max_queue == 127
    task = tmp_path / "cifar10"
    task.mkdir()
    for name in ("manifest.toml", "labels.txt"):
        (task / name).write_bytes(codecs.BOM_UTF8 + (models_dir() / "cifar10" / name).read_bytes())
    manifest = load_manifest("cifar10", tmp_path)
    assert load_labels(manifest, tmp_path) == load_labels(manifest, models_dir())


def test_a_manifest_that_is_no_text_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "manifest.toml").write_bytes(b"\xff\x00\xfe")
    with pytest.raises(ManifestError, match=r"manifest\.toml: cannot read"):
        load_manifest("cifar10", tmp_path)


def test_links_arrivals_and_foldings_may_begin_with_a_mark(tmp_path: Path) -> None:
    (tmp_path / "lan.toml").write_bytes(codecs.BOM_UTF8 + (FOLDER / "lan.toml").read_bytes())
    assert load_profile(tmp_path / "lan.toml") == load_profile("lan")
    (tmp_path / "times").write_bytes(codecs.BOM_UTF8 + b"0.5\r\n1.5\r\n")
    assert read_timestamps(tmp_path / "times") == (0.5, 1.5)
    folding = Folding(stages={"conv0": StageFolding(taps=3, pe=2)})
    assert parse_folding(codecs.BOM_UTF8 + format_folding(folding), "folding") == folding
