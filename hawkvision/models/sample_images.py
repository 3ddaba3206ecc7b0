"""Images to show something with: photographs that come with scikit-image, or one that is drawn here."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Final

from hawkvision.system.files import write_atomic

PHOTOGRAPHS: Final = ("chelsea.png", "coffee.png", "camera.png")
"""Files inside scikit-image's wheel that show one thing of which ImageNet has a class: a cat, a coffee, a tripod."""
DRAWN_SIDE: Final = 320


def photographs() -> list[Path]:
    """The photographs that scikit-image brings; none where it is not installed."""
    found = importlib.util.find_spec("skimage")
    if found is None or found.origin is None:
        return []
    data = Path(found.origin).parent / "data"
    return [data / name for name in PHOTOGRAPHS if (data / name).is_file()]


def sample_image(folder: Path) -> Path:
    """An image file on this machine: a photograph, or one drawn into `folder`."""
    known = photographs()
    if known:
        return known[0]
    # Imported here because OpenCV takes 100 ms to load.
    import cv2
    import numpy as np

    path = folder / "sample.jpg"
    if not path.is_file():
        slope = np.linspace(60, 200, DRAWN_SIDE, dtype=np.uint8)
        canvas = np.dstack((np.tile(slope, (DRAWN_SIDE, 1)), np.tile(slope[:, None], (1, DRAWN_SIDE)))).copy()
        image = np.dstack((canvas, np.full((DRAWN_SIDE, DRAWN_SIDE), 90, np.uint8)))
        cv2.circle(image, (DRAWN_SIDE // 2, DRAWN_SIDE // 2), DRAWN_SIDE // 4, (40, 140, 240), -1)
        written = cv2.imencode(".jpg", image)[1]
        write_atomic(path, bytes(written))
    return path
