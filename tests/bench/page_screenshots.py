"""Takes the screenshots of a node's page that README and the documentation show, in a real Chromium.

    python -m tests.bench.page_screenshots

It starts both tiers on free ports with a node that keeps images, sends parts of scikit-image's photographs, and writes
docs/images/page-VIEW-WIDTH-SCHEME.png, in few colours.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image

from hawkvision.cli.up import UpOptions, both_tiers
from hawkvision.client import Client
from hawkvision.models.sample_images import photographs
from tests.browser import Tab, chromium, tab

IMAGES: Final = Path(__file__).resolve().parents[2] / "docs" / "images"
VIEWS: Final = ("try", "live", "review")
WIDTHS: Final = (360, 800, 1920)
SCHEMES: Final = ("light", "dark")
SHOTS: Final = (*itertools.product(VIEWS, WIDTHS, SCHEMES), ("try", 1280, "light"))
"""README shows the last."""
COLOURS: Final = 200
SHOWN: Final = ("chelsea.png", "coffee.png", "astronaut.png", "rocket.jpg")
SETTINGS: Final = """
[edge]
audit_share = 0.2
review_max_bytes = 100_000_000
review_max_days = 1
state_file = "{0}/state"
certificates = "{0}/certificates.json"
"""


def parts(paths: list[Path]) -> Iterator[bytes]:
    """Random parts of the photographs, without end."""
    rng = np.random.default_rng(1)
    for path in itertools.cycle(paths):
        with Image.open(path) as photograph:
            side = int(rng.uniform(0.3, 1.0) * min(photograph.size))
            left, top = (int(rng.integers(0, whole - side + 1)) for whole in photograph.size)
            encoded = BytesIO()
            photograph.convert("RGB").crop((left, top, left + side, top + side)).save(encoded, "JPEG")
        yield encoded.getvalue()


def drive(client: Client, images: Iterator[bytes], stopped: threading.Event) -> None:
    """Ask for different targets until told to stop."""
    for drop, stream, image in zip(itertools.cycle((0.01, 0.02, 0.05)), itertools.cycle((None, "door")), images):
        if stopped.is_set():
            return
        client.classify(image, max_accuracy_drop=drop, stream=stream)


def enter(opened: Tab, view: str, photograph: Path) -> None:
    """Open a view and wait until it shows something."""
    opened.open(view)
    if view == "try":
        opened.page.set_input_files("#file", photograph)
        opened.page.locator("#answer .badge").first.wait_for()
        opened.page.locator("#answer summary").click()
    elif view == "live":
        opened.page.locator("#answers img:visible").first.wait_for()
        opened.page.wait_for_timeout(10_000)
    else:
        opened.page.locator("#item img").wait_for()
        opened.page.wait_for_timeout(1_000)


def main() -> int:
    """Take them all."""
    paths = [path for path in photographs() if path.name in SHOWN]
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "settings.toml"
        settings.write_text(SETTINGS.format(folder))
        options = UpOptions(settings, port=0, dc_port=0)
        with both_tiers(options, os.environ, print) as (_, node), Client(node.url) as client, chromium() as browser:
            images, stopped = parts(paths), threading.Event()
            traffic = threading.Thread(target=drive, args=(client, images, stopped))
            traffic.start()
            try:
                for view, width, scheme in SHOTS:
                    viewport = {"width": width, "height": 900 if width > 400 else 740}
                    with tab(browser, node.url, viewport=viewport, color_scheme=scheme) as opened:
                        enter(opened, view, paths[0])
                        taken = opened.page.screenshot()
                    path = IMAGES / f"page-{view}-{width}-{scheme}.png"
                    with Image.open(BytesIO(taken)) as shown:
                        shown.convert("RGB").quantize(COLOURS, kmeans=2).save(path, optimize=True)
                    print(path.name, path.stat().st_size)
            finally:
                stopped.set()
                traffic.join()
    return 0


if __name__ == "__main__":
    sys.exit(main())
