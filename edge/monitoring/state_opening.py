"""Opens the state file that a configuration names, or its default, and the evidence beside it."""

from __future__ import annotations

import logging
import sqlite3
from pathlib import Path

from edge.monitoring.evidence_log import EvidenceLog
from edge.monitoring.state_store import StateError, StateFile
from hawkvision.core.errors import ConfigError
from hawkvision.core.metrics import EdgeMetrics
from hawkvision.core.settings.config import EdgeConfig, default_state_file

log = logging.getLogger("hawkvision.edge")


def open_state(config: EdgeConfig, metrics: EdgeMetrics) -> StateFile | None:
    """The state file; None if there is to be none, or it is damaged: a node without a memory still serves.

    Raises:
        ConfigError: if it is another node's or of another kind.
    """
    path = config.state_file
    if path is None:
        path = _default_file(config)
        if path is None:
            return None
    kept, failures = metrics.state_kept.labels(config.task), metrics.state_failures.labels(config.task, "open")
    kept.set(0)
    try:
        state = StateFile(path)
    except (StateError, ConfigError) as error:
        if config.state_file is not None and isinstance(error, ConfigError):
            raise
        failures.inc()
        log.error("serving without the state of streams; what this node learns of them ends with it: %s", error)
        return None
    if state.unwritable is None:
        kept.set(1)
    else:
        failures.inc()
        log.error("state_file %s: is read, but cannot be written: %s", path, state.unwritable)
    return state


def open_evidence(config: EdgeConfig, state: StateFile | None, metrics: EdgeMetrics) -> EvidenceLog:
    """The evidence of audits, beside the state file; in memory where there is none, or it cannot be written."""
    most_bytes, most_days = config.review_max_bytes, config.review_max_days
    path = None if state is None or state.unwritable is not None else Path(f"{state.path}.audits")
    if path is not None:
        try:
            return EvidenceLog(path, config.audit_share, most_bytes=most_bytes, most_days=most_days)
        except (OSError, sqlite3.Error) as error:
            metrics.state_failures.labels(config.task, "open").inc()
            log.error("%s: serving without the evidence of earlier audits: %s", path, error)
    if most_bytes and most_days:
        log.error("no images are kept for review: there is no state_file that can be written")
    return EvidenceLog(None, config.audit_share)


def _default_file(config: EdgeConfig) -> Path | None:
    """The file of a node for which none was named; makes its folder. None, with a log line, if there can be none."""
    try:
        path = default_state_file(config)
        if path is not None:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return path
    except (OSError, RuntimeError) as error:  # no home, or none that can be written
        log.error("no state_file, and none can be made; what this node learns of streams ends with it: %s", error)
        return None
    log.info("no state_file: what this node learns of streams ends with it")
    return None
