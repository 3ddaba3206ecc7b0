"""The settings that FPGA backends add to an edge node: `fpga_*` in its section, `HAWKVISION_EDGE_FPGA_*`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.config import EdgeConfig, Millis, Word, topic
from hawkvision.core.settings.package_settings import SettingsGroup

FPGA: Final = topic("FPGA")


class FpgaSettings(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename=lambda name: f"fpga_{name}"
):
    """The settings of an FPGA backend, in addition to its model."""

    # fmt: off
    device: Annotated[Word | None, FPGA(
        "Address of the device for `fpga-device` and `fpga-offload`: `udp://HOST:PORT`.")] = None
    report: Annotated[Path | None, FPGA(
        "Report of the device's build (`hawkvision fpga build`): its folding, clock and estimated energy are "
        "used.")] = None
    folding: Annotated[Path | None, FPGA(
        "A folding in place of the report's; without both, `fpga-sim` takes the fastest for the middle device.")] = None
    clock_mhz: Annotated[float, FPGA(
        "A clock in place of the report's; without both, cycles are not converted to seconds.",
        gt=0.0, le=10_000.0)] | None = None
    deadline_ms: Annotated[Millis | None, FPGA(
        "With `fpga-offload`: the time within which the device answers 99 of 100 images; None: 50. It gets only as "
        "many images at once as it answers in time.")] = None
    # fmt: on


def _check(config: EdgeConfig, fpga: FpgaSettings) -> None:
    has_device = config.backend in ("fpga-device", "fpga-offload")
    if has_device and fpga.device is None:
        raise ConfigError(f"edge.backend = {config.backend!r}: missing edge.fpga_device, udp://HOST:PORT")
    if not has_device and fpga.device is not None:
        raise ConfigError(
            f"edge.fpga_device belongs to edge.backend = 'fpga-device' or 'fpga-offload', got {config.backend!r}"
        )
    for key in ("report", "folding", "clock_mhz"):
        if getattr(fpga, key) is not None and not config.backend.startswith("fpga-"):
            raise ConfigError(f"edge.fpga_{key} belongs to an FPGA backend, got edge.backend = {config.backend!r}")
    if fpga.deadline_ms is not None and config.backend != "fpga-offload":
        raise ConfigError(f"edge.fpga_deadline_ms belongs to edge.backend = 'fpga-offload', got {config.backend!r}")


SETTINGS: Final = SettingsGroup(section="edge", kind=FpgaSettings, check=_check)
"""Named by the entry point `fpga` of `hawkvision.settings`."""
