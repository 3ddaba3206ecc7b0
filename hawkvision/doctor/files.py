"""Checks of files: models, profile and certificates, cache, state of streams."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path

from edge.inference.edge_stage import check_stage
from edge.monitoring.state_store import APPLICATION_ID
from hawkvision.cascade.certification.profile_files import load_profile_of, load_site
from hawkvision.cascade.policy import Policy
from hawkvision.core.advice import advise
from hawkvision.core.errors import ArtifactError, ConfigError, ManifestError
from hawkvision.core.settings.config import EdgeConfig
from hawkvision.doctor.findings import Finding, ok, problem, warning
from hawkvision.models.artifacts import default_cache, load_variant
from hawkvision.models.manifest import Manifest, Variant, artifact_path
from hawkvision.system.files import check_writable


def models(task: str, variants: Iterable[Variant], cache: Path) -> Iterator[Finding]:
    """Whether each model exists and is the one in the manifest."""
    where = None if cache == default_cache() else cache
    missing: list[str] = []
    for variant in variants:
        if not artifact_path(cache, task, variant.name).exists():
            missing.append(variant.name)
            continue
        try:
            data = load_variant(cache, task, variant)
        except ArtifactError as error:
            advice = advise("models build", "--task", task, variant.name, cache_dir=where)
            yield problem(f"model {variant.name}", error.message, advice)
        else:
            yield ok(f"model {variant.name}", f"{len(data) / 1e6:.1f} MB, as the manifest says")
    if missing:
        advice = advise("models build", "--task", task, *missing, cache_dir=where)
        yield problem(f"models of {task}", f"not built yet: {', '.join(missing)}", advice)


def profile(config: EdgeConfig, manifest: Manifest, stage: str, folder: Path) -> Finding:
    """Whether the certificates were made for these models."""
    path = config.profile or folder / config.task / "profile.json"
    first = manifest.members(stage)[0].name
    try:
        loaded = load_profile_of(manifest, folder, config.profile)
        site = None if config.certificates is None else load_site(config.certificates)
        for known in loaded.stages:
            if known.name in (stage, first, manifest.best):
                check_stage(known, manifest, str(path))
        Policy(loaded, stage, manifest.best, alone=config.datacenter_url is None, site=site, first=first)
    except ManifestError as error:
        return problem(
            "profile", error.message, advise("calibrate", "--task", config.task, "--edge", stage, "--data", "IMAGES")
        )
    whose = path if config.certificates is None else config.certificates
    return ok("profile", f"{whose} is about {stage} and {manifest.best} as the manifest has them")


def cache(folder: Path) -> Finding:
    """Whether the cache can be written, for example for compiled kernels."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        check_writable(folder / ".doctor")
    except (ConfigError, OSError) as error:
        return warning(
            "cache",
            str(error),
            "harmless if models are built and kernels brought, as in a container; else let this user write there",
        )
    return ok("cache", f"{folder} can be written")


def state_file(path: Path | None, *, default: bool = False) -> Finding:
    """Whether the state of streams is kept across restarts; `default` if the operator did not set the path."""
    if path is None:
        return warning(
            "state file", "none: a restart forgets alarms and debts", "set edge.state_file to a file on a local disk"
        )
    if default and not path.parent.exists():
        made = next(folder for folder in path.parents if folder.exists())
        if not os.access(made, os.W_OK):
            advice = "set edge.state_file to a file on a local disk"
            return warning("state file", f"{path} cannot be made: a restart forgets alarms and debts", advice)
        return ok("state file", f"{path} can be made")
    advice = f"give this user the right to write in {path.parent}, or name another file"
    try:
        check_writable(path)
    except ConfigError as error:
        return problem("state file", error.message, advice)
    if not path.exists():
        return ok("state file", f"{path} can be made")
    try:
        with contextlib.closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as opened:
            (number,) = opened.execute("PRAGMA application_id").fetchone()
            (sound,) = opened.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.Error as error:
        return problem("state file", f"{path}: {error}", "move it away: the node makes a new one")
    if number != APPLICATION_ID:
        return problem("state file", f"{path} is a database of something else", "name another file")
    if sound != "ok":
        return problem("state file", f"{path} is damaged: {sound}", "move it away: the node makes a new one")
    return ok("state file", f"{path} is sound")
