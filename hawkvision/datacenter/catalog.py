"""What a tier serves: the rungs of one task, worked out from the manifest and the settings, without starting anything.

The committee is no model of its own: a request for it asks its members, which are loaded once, and shared with the
rungs of their own names. Variants that are asked together are a group, and are deployed together; groups scale apart.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from hawkvision.core.config import DatacenterConfig
from hawkvision.core.errors import ConfigError, ManifestError
from hawkvision.core.escalation_api import Rung, RungMember, Rungs
from hawkvision.inference.backend_registry import ON_THE_CPU
from hawkvision.models.fingerprints import stage_fingerprint
from hawkvision.models.manifest import Manifest, Variant, load_manifest, models_dir


@dataclass(frozen=True, slots=True)
class ServedRung:
    """How a rung is answered: by these members, over the mirror image too if `mirrored`, then `temperature`."""

    name: str
    members: tuple[str, ...]
    mirrored: bool = False
    temperature: float = 1.0
    fingerprint: str | None = None
    """`Manifest.fingerprint`, where the settings ask for an execution that certificates are about; else None."""

    def ran(self, stated: str) -> str | None:
        """Its fingerprint if a process ran its members that states this; None if that does not have them all."""
        return stage_fingerprint(stated, self.members, horizontal_flip=self.mirrored, temperature=self.temperature)


@dataclass(frozen=True, slots=True)
class Group:
    """Variants that share pictures, directly or over others: they live in one process. Named after their best rung."""

    name: str
    variants: tuple[Variant, ...]


@dataclass(frozen=True, slots=True)
class Catalog:
    """The rungs from cheapest to best and the variants, each once, that they run on."""

    task: str
    classes: int
    rungs: tuple[ServedRung, ...]
    variants: tuple[Variant, ...]
    has_artifacts: bool

    @property
    def best(self) -> ServedRung:
        """The rung that answers when the caller names none."""
        return self.rungs[-1]

    def rung(self, name: str) -> ServedRung | None:
        """The rung of that name, or None."""
        return next((r for r in self.rungs if r.name == name), None)

    @property
    def groups(self) -> tuple[Group, ...]:
        """All variants, each in one group; the best rung's group is the last."""
        parts: list[tuple[str, set[str]]] = []
        for rung in self.rungs:
            members = set(rung.members)
            joined = [part for part in parts if part[1] & members]
            parts = [part for part in parts if part not in joined]
            parts.append((rung.name, members.union(*(its for _, its in joined))))
        return tuple(Group(name, tuple(v for v in self.variants if v.name in its)) for name, its in parts)

    def listing(self, stated: Collection[str] = ()) -> Rungs:
        """The reply to `GET /v1/rungs`; `stated` is what replicas have stated, the newest first."""
        hashes = {v.name: v.sha256 if self.has_artifacts else None for v in self.variants}
        rungs = tuple(
            Rung(
                r.name,
                tuple(RungMember(m, hashes[m]) for m in r.members),
                r.fingerprint,
                next((ran for each in stated if (ran := r.ran(each))), None),
            )
            for r in self.rungs
        )
        return Rungs(self.task, self.best.name, rungs)


def load_catalog(config: DatacenterConfig) -> Catalog:
    """The catalog of `config.task`.

    Raises:
        NotFound: if the task has no manifest.
        ConfigError: if `variants` names something that the manifest does not know.
    """
    return catalog_of(load_manifest(config.task, models_dir(config.models_dir)), config)


def catalog_of(manifest: Manifest, config: DatacenterConfig) -> Catalog:
    """The rungs that `config.variants` asks for (empty: the manifest's `ladder.dc`), best last.

    Raises:
        ConfigError: if a name is neither a variant nor a committee, or stands twice, or is a committee with
            `sure_from`.
    """
    names = config.variants or manifest.ladder.dc
    if len(set(names)) != len(names):
        raise ConfigError(f"dc.variants: every rung once, got {', '.join(names)}")
    usual = config.backend in ("auto", "int8", "onnxruntime") and config.providers == ON_THE_CPU
    rungs: list[ServedRung] = []
    variants: dict[str, Variant] = {}
    for name in names:
        committee = manifest.committee(name)
        try:
            members = manifest.members(name)
        except ManifestError as error:
            raise ConfigError(f"dc.variants: {error}") from None
        if committee is not None and committee.sure_from is not None:
            raise ConfigError(f"dc.variants: {name!r} is a committee with sure_from, which only edge nodes run")
        flip = committee is not None and committee.horizontal_flip
        temperature = committee.temperature if committee is not None else 1.0
        fingerprint = manifest.fingerprint(name) if usual else None
        rungs.append(ServedRung(name, tuple(m.name for m in members), flip, temperature, fingerprint))
        variants |= {m.name: m for m in members}
    return Catalog(manifest.task, manifest.classes, tuple(rungs), tuple(variants.values()), config.backend != "noop")
