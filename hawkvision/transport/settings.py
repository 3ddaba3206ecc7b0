"""The settings that the datagram transport adds to a node and to a datacenter tier."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from hawkvision.core.settings.access import check_both_or_neither
from hawkvision.core.settings.config import DatacenterConfig, EdgeConfig, Port, Word
from hawkvision.core.settings.package_settings import Section, SettingsGroup


class DatagramSettings(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename=lambda name: f"datagram_{name}"
):
    """Where a server takes images as datagrams, and how."""

    # == Datagrams ==
    port: Port | None = None
    """UDP port of the datagram transport, at `host`; 0 takes a free one, None listens to none. A datacenter tier
    offers it on one machine only: behind a cluster's HTTP proxies no one process has the port."""
    certificate: Path | None = None
    """PEM file of the datagram transport's certificate, read again when it changes; without it the server makes its
    own at each start. Clients compare the certificate: its dates and names do not matter to them."""
    key: Path | None = None
    """PEM file of the private key of that certificate."""
    congestion_control: Word = "loss_tolerant"
    """Congestion controller of datagrams: `loss_tolerant`, `bbr`, or one that a package adds."""


def _check(section: Section, _: EdgeConfig | DatacenterConfig, datagrams: DatagramSettings) -> None:
    check_both_or_neither(section, "datagram_certificate", datagrams.certificate, "datagram_key", datagrams.key)


EDGE: Final = SettingsGroup(section="edge", kind=DatagramSettings, check=partial(_check, "edge"))
DATACENTER: Final = SettingsGroup(section="dc", kind=DatagramSettings, check=partial(_check, "dc"))
"""Named by entry points of `hawkvision.settings`."""
