"""The settings that the datagram transport adds to a node and to a datacenter tier."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Final

import msgspec

from hawkvision.core.settings.access import check_both_or_neither
from hawkvision.core.settings.config import DatacenterConfig, EdgeConfig, Port, Word, topic
from hawkvision.core.settings.package_settings import Section, SettingsGroup

DATAGRAMS: Final = topic("Datagrams")


class DatagramSettings(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename=lambda name: f"datagram_{name}"
):
    """Where a server takes images as datagrams, and how."""

    # fmt: off
    port: Annotated[Port | None, DATAGRAMS(
        "UDP port of the datagram transport, at `host`; 0 takes a free one, None listens to none. A datacenter tier "
        "offers it on one machine only: behind a cluster's HTTP proxies no one process has the port.")] = None
    certificate: Annotated[Path | None, DATAGRAMS(
        "PEM file of the datagram transport's certificate, read again when it changes; without it the server makes "
        "its own at each start. Clients compare the certificate: its dates and names do not matter to them.")] = None
    key: Annotated[Path | None, DATAGRAMS("PEM file of the private key of that certificate.")] = None
    congestion_control: Annotated[Word, DATAGRAMS(
        "Congestion controller of datagrams: `loss_tolerant`, or one that a package adds.")] = "loss_tolerant"
    # fmt: on


def _check(section: Section, _: EdgeConfig | DatacenterConfig, datagrams: DatagramSettings) -> None:
    check_both_or_neither(section, "datagram_certificate", datagrams.certificate, "datagram_key", datagrams.key)


EDGE: Final = SettingsGroup(section="edge", kind=DatagramSettings, check=partial(_check, "edge"))
DATACENTER: Final = SettingsGroup(section="dc", kind=DatagramSettings, check=partial(_check, "dc"))
"""Named by entry points of `hawkvision.settings`."""
