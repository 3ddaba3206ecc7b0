"""The certificates of a node: read with all that they depend on, and replaced while the node serves.

They depend on the task's manifest, which pins its `profile.json`; the profile, which may be the operator's own; and a
site's certificates. All of these are read and checked together, on a thread. Then they replace those in force, between
two steps of the event loop. An answer is judged by the certificates by which it was routed, if they are still in force
when it is given; otherwise it claims nothing.

A shipped profile is replaced together with its manifest, which must pin it. A profile about other models of the edge
stage than the loaded ones is refused; to load others takes a restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from hawkvision.cascade.certification.profile import Profile
from hawkvision.cascade.certification.profile_files import load_profile_of, load_site
from hawkvision.cascade.certification.site_certificates import SiteCertificates
from hawkvision.cascade.policy import Policy
from hawkvision.core.errors import HawkVisionError, ManifestError
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.models.fingerprints import CertifiedVersions
from hawkvision.models.manifest import Manifest, load_manifest, models_dir
from hawkvision.system.files import sha256_of
from hawkvision.tasks.registry import load_kind

log = logging.getLogger("hawkvision.edge")


@dataclass(frozen=True, slots=True)
class Certification:
    """A policy, and the certificates and versions that belong to it."""

    profile: Profile
    policy: Policy
    versions: CertifiedVersions
    temperature: float
    """Of the edge stage, from `profile`."""
    score: str
    """The score of the edge stage that thresholds are compared with."""
    content: str = ""
    """A digest of the files."""


class MakePolicy(Protocol):
    """Makes the routes of one cascade."""

    def __call__(
        self, profile: Profile, edge: str, best: str, *, alone: bool = False, site: SiteCertificates | None = None
    ) -> Policy:
        """See `Policy`."""
        ...


def files_of(config: EdgeConfig) -> tuple[Path, ...]:
    """The files that a node's certification is read from; not all of them need exist."""
    folder = models_dir(config.models_dir, config.task) / config.task
    found = [folder / "manifest.toml", config.profile or folder / "profile.json"]
    if config.certificates is not None:
        found.append(config.certificates)
    return tuple(found)


def load_certification(config: EdgeConfig, manifest: Manifest, make_policy: MakePolicy | None = None) -> Certification:
    """Read and check a node's certification; `make_policy` makes a baseline's routes in place of certified ones.

    Raises:
        ManifestError: if a file is missing, broken or altered, or they do not belong together, such as a profile and
            other labels, or if the reference stage is measurably worse than a stage below it.
    """
    content = _content(config)
    models = models_dir(config.models_dir, config.task)
    name = stage_of(config, manifest)
    profile = load_profile_of(manifest, models, config.profile)
    kind = load_kind(manifest, models)
    profile.check_labels(kind.labels)
    site = _site_of(config)
    alone, first = config.datacenter_url is None, manifest.members(name)[0].name
    if make_policy is None:
        policy = Policy(
            profile, name, manifest.best, alone=alone, site=site, first=first,
            agreement_bounds_drop=kind.agreement_bounds_drop,
        )  # fmt: skip
        if not config.allow_worse_reference:
            between = policy.pair.intermediate
            profile.check_reference(manifest.best, (name, *(() if between is None else (between.name,))))
    else:
        policy = make_policy(profile, name, manifest.best, alone=alone, site=site)
    stages = {stage.name: stage.fingerprint for stage in profile.stages}
    return Certification(
        profile,
        policy,
        CertifiedVersions(stages, None if site is None else site.executions),
        profile.stage(name).temperature,
        policy.pair.score,
        content,
    )


def _site_of(config: EdgeConfig) -> SiteCertificates | None:
    """The site's certificates; None if there are none, or none yet: `POST /v1/certificates` will write the file.

    Raises:
        ManifestError: if they cannot be read, or the folder is missing.
    """
    path = config.certificates
    if path is not None and not path.exists() and path.parent.is_dir():
        log.warning("certificates %s: no such file yet; those of the profile count until there is", path)
        return None
    return None if path is None else load_site(path)


def stage_of(config: EdgeConfig, manifest: Manifest) -> str:
    """The edge stage that a node runs: the one its configuration names, or the manifest's default.

    Every policy runs the same stage, so that a comparison compares decisions alone. The no-op backend does not look at
    images, and runs the first member of a conditional ensemble.

    Raises:
        ManifestError: if it is an ensemble that nodes or this backend do not run, or the task has no stage for FPGAs.
    """
    name = config.variant or _default_stage(config, manifest)
    if config.variant is None and config.backend == "noop":
        name = manifest.members(name)[0].name
    ensemble = manifest.ensemble(name)
    if ensemble is not None and ensemble.accept_confidence is None:
        raise ManifestError(
            f"edge.variant = {name!r}: an edge node runs single variants and ensembles with accept_confidence, "
            "and this ensemble has none"
        )
    if ensemble is not None and config.backend.startswith("fpga-"):
        raise ManifestError(
            f"edge.variant = {name!r}: backend {config.backend!r} runs single variants only, and this is an ensemble; "
            f"expected one of {', '.join(ensemble.members)}"
        )
    return name


def _default_stage(config: EdgeConfig, manifest: Manifest) -> str:
    if not config.backend.startswith("fpga-"):
        return manifest.cascade.default_edge
    if manifest.cascade.fpga is None:
        raise ManifestError(
            f"task {config.task!r} has no stage for FPGAs: name one in edge.variant, or take another backend"
        )
    return manifest.cascade.fpga


class CertificationReload:
    """Puts certificates in force that have changed. Used on one event loop."""

    def __init__(self, config: EdgeConfig, adopt: Callable[[Certification], None], loaded: Certification) -> None:
        """Begin with what was loaded; `adopt` puts other certificates in force, or raises `ManifestError`."""
        self._config = config
        self._adopt = adopt
        self._content = loaded.content
        self._reading: asyncio.Task[None] | None = None
        self._again = False

    def reload(self) -> None:
        """Read the files again, in the background. Files that are broken are logged and change nothing."""
        if self._reading is not None and not self._reading.done():
            self._again = True
            return
        self._reading = asyncio.get_running_loop().create_task(self._read())

    async def _read(self) -> None:
        while True:
            self._again = False
            try:
                found = await asyncio.to_thread(self._load)
                if found.content != self._content:
                    self._adopt(found)
                    self._content = found.content
                    log.info("certificates: read again, and in force from now on (%s)", found.content[:12])
            except HawkVisionError as error:
                log.error("certificates: what was in use stays in use: %s", error)
            except Exception:  # a defect must not end the other reloads
                log.exception("certificates: what was in use stays in use")
            if not self._again:
                return

    def _load(self) -> Certification:
        config = self._config
        return load_certification(config, load_manifest(config.task, models_dir(config.models_dir, config.task)))

    async def close(self) -> None:
        """Cancel reading."""
        if self._reading is not None:
            self._reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._reading


def _content(config: EdgeConfig) -> str:
    """A digest of the files, made before they are loaded: a change meanwhile is found at the next reload."""
    parts = []
    for path in files_of(config):
        try:
            parts.append(sha256_of(path.read_bytes()))
        except OSError:
            parts.append("")
    return sha256_of("|".join(parts).encode())
