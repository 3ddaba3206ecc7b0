"""Measures what an image takes of a backend on this machine, or reads an earlier measurement.

Service times are measured with one image after another. CPU seconds are measured with images at random times and at
several rates, as in a server, because they depend on whether cores rest between images.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from fpga.offload.cost_model import CpuWork, LinkModel
from fpga.offload.queueing import ServiceTime
from hawkvision.core.errors import ConfigError
from hawkvision.core.text_files import decode_text
from hawkvision.inference.backends.interface import Backend
from hawkvision.system.files import write_atomic

BATCHES: Final = (1, 4)
"""Batch sizes: one image, and as many as the edge node's workers run together."""
LEAST_RUNS: Final = 50
WARM_UP_RUNS: Final = 10
MAX_RUNS: Final = 20_000
IN_FLIGHT: Final = 40
"""Most images in flight while CPU seconds are measured; more than a device's places."""
LEAST_IMAGES: Final = 10
"""Images at each rate, at least."""
TURNS: Final = 4
"""Turns of each rate while CPU seconds are measured, because a shared core's speed drifts within a minute."""

Durations = Annotated[tuple[Annotated[float, Meta(gt=0.0)], ...], Meta(min_length=1, max_length=200)]


class BatchTiming(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Timings of one batch size: seconds per run, as equally likely values."""

    batch: Annotated[int, Meta(ge=1)]
    runs: Annotated[int, Meta(ge=1)]
    mean_s: float
    variation: float
    """Standard deviation ÷ mean."""
    cpu_s: float
    """Mean CPU seconds of the calling thread per run."""
    quantiles_s: Durations

    @property
    def service(self) -> ServiceTime:
        """The distribution for the queueing model."""
        return ServiceTime(self.quantiles_s)


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A backend's timings on one machine."""

    format: Literal[1] = 1
    backend: str
    machine: str
    timings: Annotated[tuple[BatchTiming, ...], Meta(min_length=1)]

    def one(self, where: str) -> BatchTiming:
        """The timing of one image at a time.

        Raises:
            ConfigError: if there is no such timing.
        """
        for timing in self.timings:
            if timing.batch == 1:
                return timing
        raise ConfigError(f"{where}: expected timings of batch 1, got {[timing.batch for timing in self.timings]}")


def measure(backend: Backend, name: str, seconds: float = 1.0) -> Calibration:
    """Measure a backend with noise for about `seconds` per batch size, one call at a time."""
    rng = np.random.default_rng(0)
    timings = []
    for batch in BATCHES:
        images = rng.integers(0, 256, (batch, *backend.input_shape), dtype=np.uint8)
        for _ in range(WARM_UP_RUNS):
            backend.infer(images)
        taken: list[float] = []
        end, cpu_before = time.perf_counter() + seconds, time.thread_time()
        while len(taken) < LEAST_RUNS or (time.perf_counter() < end and len(taken) < MAX_RUNS):
            started = time.perf_counter()
            backend.infer(images)
            taken.append(time.perf_counter() - started)
        cpu_s = (time.thread_time() - cpu_before) / len(taken)
        service = ServiceTime.measured(taken)
        timings.append(
            BatchTiming(
                batch=batch,
                runs=len(taken),
                mean_s=float(np.mean(taken)),
                variation=float(np.std(taken) / np.mean(taken)),
                cpu_s=cpu_s,
                quantiles_s=service.atoms,
            )
        )
    return Calibration(backend=name, machine=f"{platform.machine()} {platform.node()}", timings=tuple(timings))


def measure_work(
    backend: Backend, rates_hz: Sequence[float], seconds: float, most: int = MAX_RUNS, seed: int = 0
) -> CpuWork:
    """CPU seconds of this process per image at several rates, each for about `seconds` or `most` images.

    Images arrive at random (Poisson), and each has its own thread, as in a server. All CPU time of the process counts,
    except the calling thread's, so nothing else should run. A rate that this machine cannot reach is reported as the
    rate that it reached.

    Raises:
        BackendError: as `backend.infer`.
    """
    rng = np.random.default_rng(seed)
    noise = rng.integers(0, 256, (16, *backend.input_shape), dtype=np.uint8)
    spans_s, works_s, images = (np.zeros(len(rates_hz)) for _ in range(3))
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        for _ in range(WARM_UP_RUNS):
            pool.submit(backend.infer, noise[:1]).result()
        for place, rate_hz in [*enumerate(rates_hz)] * TURNS:
            n = math.ceil(min(max(LEAST_IMAGES, rate_hz * seconds), most) / TURNS)
            due = rng.exponential(1 / rate_hz, n).cumsum()
            begun, process_s, own_s = time.perf_counter(), time.process_time(), time.thread_time()
            waiting = []
            for i, arrival in enumerate(due.tolist()):
                time.sleep(max(0.0, begun + arrival - time.perf_counter()))
                waiting.append(pool.submit(backend.infer, noise[i % 16 : i % 16 + 1]))
            for answer in waiting:
                answer.result()
            works_s[place] += time.process_time() - process_s - (time.thread_time() - own_s)
            spans_s[place] += time.perf_counter() - begun
            images[place] += n
    found = sorted(zip((images / spans_s).tolist(), (works_s / images).tolist(), strict=True))
    return CpuWork(tuple(rate for rate, _ in found), tuple(each_s for _, each_s in found))


def measure_link(fpga: Backend, device_s: float, bytes_per_s: float, host: CpuWork, seconds: float = 1.0) -> LinkModel:
    """The delay to an idle FPGA and back, beside the device's own time, from one image after another.

    The median is taken, so that one pause of this machine does not count. `host` is the result of `measure_work`.
    """
    noise = np.random.default_rng(0).integers(0, 256, (16, *fpga.input_shape), dtype=np.uint8)
    for i in range(WARM_UP_RUNS):
        fpga.infer(noise[i : i + 1])
    taken: list[float] = []
    end = time.perf_counter() + seconds
    while len(taken) < LEAST_IMAGES or (time.perf_counter() < end and len(taken) < MAX_RUNS):
        started = time.perf_counter()
        fpga.infer(noise[len(taken) % 16 :][:1])
        taken.append(time.perf_counter() - started)
    around_s = max(0.0, float(np.median(taken)) - device_s - host.at(0.0))
    return LinkModel(bytes_per_s, around_s / 2, host)


def load_calibration(path: Path) -> Calibration:
    """Read a calibration that `save_calibration` wrote.

    Raises:
        ConfigError: if it cannot be read, or is no calibration.
    """
    try:
        return parse_calibration(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def parse_calibration(content: bytes, where: str) -> Calibration:
    """A calibration from JSON; `where` names it in errors.

    Raises:
        ConfigError: if it is no calibration.
    """
    try:
        return msgspec.json.decode(decode_text(content), type=Calibration)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: not a calibration: {error}") from None


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Write a calibration as indented JSON."""
    write_atomic(path, msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n")
