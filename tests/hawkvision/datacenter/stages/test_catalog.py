from __future__ import annotations

import msgspec
import pytest

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.stages.catalog import Catalog, catalog_of
from hawkvision.inference.backend_registry import BackendKind
from hawkvision.models.manifest import Ensemble, Manifest
from tests.hawkvision.tasks.classes import classes_of


def test_members_are_loaded_once_however_many_stages_use_them(manifest: Manifest) -> None:
    catalog = catalog_of(manifest, classes_of(manifest), DatacenterConfig(tasks=("shapes",)))
    assert [r.name for r in catalog.stages] == ["medium", "reference"]
    assert sorted(v.name for v in catalog.variants) == ["medium", "small"]
    assert catalog.best.members == ("small", "medium")
    assert catalog.best.mirrored


def test_the_listing_names_each_members_file_by_hash(manifest: Manifest) -> None:
    hashed = msgspec.structs.replace(manifest.variant("small"), sha256="a" * 64)
    known = msgspec.structs.replace(manifest, variants=(hashed, manifest.variant("medium")))
    listing = catalog_of(known, classes_of(known), DatacenterConfig(tasks=("shapes",))).listing()
    assert {m.name: m.sha256 for m in listing.stages[1].members} == {"small": "a" * 64, "medium": None}


@pytest.mark.parametrize("names", [("huge",), ("medium", "medium")])
def test_unknown_and_repeated_stages_are_refused(manifest: Manifest, names: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=names[0]):
        catalog_of(manifest, classes_of(manifest), DatacenterConfig(tasks=("shapes",), variants=names))


@pytest.mark.parametrize(
    ("backend", "providers", "certifiable"),
    [
        ("auto", ("CPUExecutionProvider",), True),
        ("onnxruntime", ("CPUExecutionProvider",), True),
        ("onnxruntime", ("CUDAExecutionProvider", "CPUExecutionProvider"), False),
    ],
)
def test_no_fingerprint_is_offered_of_logits_that_no_certificate_is_about(
    manifest: Manifest, backend: BackendKind, providers: tuple[str, ...], certifiable: bool
) -> None:
    served = catalog_of(manifest, classes_of(manifest), DatacenterConfig(backend=backend, onnx_providers=providers))
    assert {stage.fingerprint is not None for stage in served.stages} == {certifiable}


def test_an_ensemble_whose_members_look_one_after_the_other_is_for_edge_nodes(manifest: Manifest) -> None:
    steps = Ensemble("steps", ("small", "medium"), accept_confidence=0.8)
    more = msgspec.structs.replace(manifest, ensembles=(*manifest.ensembles, steps))
    with pytest.raises(ConfigError, match="'steps' is an ensemble with accept_confidence, which only edge nodes run"):
        catalog_of(more, classes_of(more), DatacenterConfig(tasks=("shapes",), variants=("medium", "steps")))


def test_variants_that_share_images_form_one_group(manifest: Manifest) -> None:
    alone = msgspec.structs.replace(manifest.variant("small"), name="large")
    pair = Ensemble("pair", ("large", "huge"))
    huge = msgspec.structs.replace(manifest.variant("small"), name="huge")
    more = msgspec.structs.replace(
        manifest, variants=(*manifest.variants, alone, huge), ensembles=(*manifest.ensembles, pair)
    )
    names = ("small", "large", "medium", "reference")
    catalog = catalog_of(more, classes_of(more), DatacenterConfig(tasks=("shapes",), variants=names))
    assert members(catalog) == {"large": ["large"], "reference": ["small", "medium"]}
    assert list(members(catalog))[-1] == catalog.best.name
    joined = catalog_of(more, classes_of(more), DatacenterConfig(tasks=("shapes",), variants=(*names, "huge", "pair")))
    assert members(joined) == {"reference": ["small", "medium"], "pair": ["large", "huge"]}


def members(catalog: Catalog) -> dict[str, list[str]]:
    return {group.name: [variant.name for variant in group.variants] for group in catalog.groups}
