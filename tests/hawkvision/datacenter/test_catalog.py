from __future__ import annotations

import msgspec
import pytest

from hawkvision.config import DatacenterConfig
from hawkvision.datacenter.catalog import catalog_of
from hawkvision.errors import ConfigError
from hawkvision.manifest import Manifest


def test_members_are_loaded_once_however_many_rungs_use_them(manifest: Manifest) -> None:
    catalog = catalog_of(manifest, DatacenterConfig(task="shapes"))
    assert [r.name for r in catalog.rungs] == ["medium", "committee"]
    assert sorted(v.name for v in catalog.variants) == ["medium", "small"]
    assert catalog.best.members == ("small", "medium")
    assert catalog.best.mirrored


def test_the_listing_names_each_members_file_by_hash(manifest: Manifest) -> None:
    hashed = msgspec.structs.replace(manifest.variant("small"), sha256="a" * 64)
    known = msgspec.structs.replace(manifest, variants=(hashed, manifest.variant("medium")))
    listing = catalog_of(known, DatacenterConfig(task="shapes")).listing()
    assert {m.name: m.sha256 for m in listing.rungs[1].members} == {"small": "a" * 64, "medium": None}


@pytest.mark.parametrize("names", [("huge",), ("medium", "medium")])
def test_unknown_and_repeated_rungs_are_refused(manifest: Manifest, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=names[0]):
        catalog_of(manifest, DatacenterConfig(task="shapes", variants=names))


def test_a_variant_that_only_committees_have_never_looks_alone(manifest: Manifest, config: DatacenterConfig) -> None:
    catalog = catalog_of(manifest, config)
    assert [r.members for r in catalog.rungs] == [("medium",), ("small", "medium")]
    assert {name: catalog.looks_alone(name) for name in ("small", "medium")} == {"small": False, "medium": True}
