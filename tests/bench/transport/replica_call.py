"""`python -m tests.bench.transport.replica_call`: an image's way to a replica, by Serve's handle and by a local socket.

Starts one private Ray with the same groups for both and sends the same image over both ways in turns, from one caller
and from eight at once: the reference stage and the cheapest stage of task imagenet, and a stage of no-op variants. A
round is so many images on each way; its figure is the ratio of the two medians. The worst, median and best round are
printed. The times are those of `run_two_stages`, so the server's own HTTP is in neither.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import cv2
import numpy as np

from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.launch import local_ray
from hawkvision.datacenter.local_socket.registry import QueueBounds, ReplicaRegistry
from hawkvision.datacenter.stages.cascade_executor import Variants, run_two_stages
from hawkvision.datacenter.stages.catalog import Catalog, ServedStage, load_catalog

WARM_UP: Final = 20
CALLERS: Final = (1, 8)
CONFIGS: Final = (DatacenterConfig(), DatacenterConfig(backend="noop"))


def main() -> int:
    """Run the comparison and print one row per stage, mode and number of callers."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--images", type=int, default=48, help="per round and way")
    parser.add_argument("--noop", action="store_true", help="the no-op variants only")
    given = parser.parse_args()
    local_ray.set_environment()
    local_ray.adopt_orphans()
    print(f"{os.cpu_count()} cores, {given.rounds} rounds of {given.images} images on each way; milliseconds")
    head = f"{'stage':34}{'mode':>10}{'callers':>8}{'socket P50':>11}{'handle P50':>11}"
    print(head + f"{'handle / socket: worst':>24}{'median':>8}{'best':>7}", flush=True)
    for config in CONFIGS[1:] if given.noop else CONFIGS:
        asyncio.run(_compare(config, given.rounds, given.images))
    return 0


async def _compare(config: DatacenterConfig, rounds: int, images: int) -> None:
    """Start a tier, measure its stages, and stop it."""
    catalog = load_catalog(config)
    registry = ReplicaRegistry([group.name for group in catalog.groups], QueueBounds(32, 128))
    await registry.listen()
    with tempfile.TemporaryDirectory(prefix="hawkvision") as folder, ThreadPoolExecutor(1, "ray") as ray_thread:
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(ray_thread, local_ray.start_ray, config, catalog, Path(folder))
            ways = await loop.run_in_executor(ray_thread, local_ray.deploy_groups, config, catalog, registry)
            while registry.absent or not await loop.run_in_executor(ray_thread, local_ray.all_running, catalog):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            for stage in (catalog.best, catalog.stages[0]) if config.backend != "noop" else (catalog.stages[0],):
                await _measure(catalog, stage, ways, rounds, images, config.backend)
        finally:
            registry.close()
            await loop.run_in_executor(ray_thread, lambda: local_ray.stop_ray(ask=True))


async def _measure(
    catalog: Catalog, stage: ServedStage, ways: Sequence[Variants], rounds: int, images: int, backend: str
) -> None:
    for streaming in (False, True):
        for callers in CALLERS:
            for way in ways:
                await _round(way, stage, streaming, callers, WARM_UP)
            medians: list[tuple[float, float]] = []
            for _ in range(rounds):
                took: tuple[list[float], list[float]] = ([], [])
                for _ in range(images // callers):
                    for way, its in zip(ways, took, strict=True):
                        its += await _round(way, stage, streaming, callers, callers)
                medians.append((float(np.median(took[0])), float(np.median(took[1]))))
            ratios = sorted(handle / local for local, handle in medians)
            local_p50, handle_p50 = np.median(np.array(medians), axis=0)
            name, mode = f"{stage.name} ({backend})", "streaming" if streaming else "plain"
            row = f"{name:34}{mode:>10}{callers:8}{local_p50:11.2f}{handle_p50:11.2f}"
            print(row + f"{ratios[-1]:24.3f}{np.median(ratios):8.3f}{ratios[0]:7.3f}", flush=True)


async def _round(way: Variants, stage: ServedStage, streaming: bool, callers: int, images: int) -> list[float]:
    """Milliseconds of each image."""

    async def one() -> float:
        started = time.perf_counter()
        await run_two_stages(way, stage, None, IMAGE, None, (lambda _: None) if streaming else None)
        return (time.perf_counter() - started) * 1e3

    took: list[float] = []
    for _ in range(max(1, images // callers)):
        took += await asyncio.gather(*(one() for _ in range(callers)))
    return took


def _image() -> bytes:
    """A smooth random 500 x 375 JPEG of about 30 KB, like a typical ImageNet image."""
    noise = np.random.default_rng(0).integers(0, 256, (375, 500, 3), dtype=np.uint8)
    return bytes(cv2.imencode(".jpg", cv2.GaussianBlur(noise, (5, 5), 0), [cv2.IMWRITE_JPEG_QUALITY, 55])[1])


IMAGE: Final = _image()


if __name__ == "__main__":
    sys.exit(main())
