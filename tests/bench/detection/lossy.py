"""`python -m tests.bench.detection.lossy --data …/coco_eval.npz`: what is found in images that a lossy link has cut.

Images of val2017 are coded and cut into datagrams as edge nodes do it. The i-th datagram of an image is lost in all
ways of sending or in none; losses are independent, or Gilbert's with runs of four on average.

    sent       parity and quality as the sender chooses them for this link
    no parity  the same quality without parity: nearly every image arrives in part

Given are mAP, AP50 and mean F1, the share of images that arrived whole, and the mean received fraction. An image of
which too little arrived has no boxes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from rich.console import Console
from rich.progress import track

from hawkvision.imaging.preprocessing import decode as decode_image
from hawkvision.imaging.preprocessing import probe
from hawkvision.tasks.boxes.average_precision import detection_quality
from hawkvision.tasks.boxes.rows import MEMBERS
from hawkvision.transport.coding.image_coding import encode
from hawkvision.transport.coding.rate_fec_control import choose
from hawkvision.transport.protocol.wire import FRAGMENT_ROOM
from tests.bench.detection.outputs import MAX_PIXELS, CocoImages, CocoOutputs, add_data_option, read_coco_images
from tests.bench.inference.lossy_accuracy import DatagramLink, Sender, SentImage

LINKS: Final = tuple(DatagramLink(*each) for each in ((0.0, False), (0.05, False), (0.2, False), (0.2, True)))
WAYS: Final = ("sent", "no parity")
BUDGET: Final = 1
"""Of bytes; no quality is fitted to it."""


def send(body: bytes, image: int) -> dict[tuple[str, DatagramLink], SentImage]:
    """What arrives of one image in every way over every link."""
    pixels = decode_image(body, probe(body), max_pixels=MAX_PIXELS, min_side=1 << 16)
    sender = Sender(pixels, BUDGET)
    found = {}
    for link in LINKS:
        plan = choose(link.state, 1.0)
        for way, chosen in zip(WAYS, (plan, replace(plan, parity=0.0)), strict=True):
            found[way, link] = sender.sent(encode(pixels, chosen, FRAGMENT_ROOM), link.pattern(image))
    return found


def figures(images: CocoImages, sent: Sequence[dict[tuple[str, DatagramLink], SentImage]], console: Console) -> None:
    """Run the stages on all that arrived, and print the table."""
    bodies = list(dict.fromkeys(one.body for each in sent for one in each.values() if one.body is not None))
    place = {body: i for i, body in enumerate(bodies)}
    outputs = CocoOutputs("coco", bodies)
    nothing = np.zeros((0, MEMBERS), np.float32)
    clean = {int(index) for index in images.clean}
    console.print(
        "| stage | loss | way | whole | received fraction | val2017: mAP / AP50 / F1 | clean |\n|---" + "|---" * 6 + "|"
    )
    for stage in (outputs.manifest.cascade.default_edge, outputs.manifest.best):
        found = outputs.of(stage)
        for link in LINKS:
            for way in WAYS:
                ones = [each[way, link] for each in sent]
                boxes = [nothing if one.body is None else found[place[one.body]] for one in ones]
                cells = []
                for part in (set(images.val.tolist()), clean):
                    chosen = [i for i, index in enumerate(images.val) if int(index) in part]
                    truths = [images.truths[images.val[i]] for i in chosen]
                    quality = detection_quality([boxes[i] for i in chosen], truths)
                    f1 = 1 - outputs.kind.losses([boxes[i] for i in chosen], truths).mean()
                    cells.append(f"{quality.ap * 100:.1f} / {quality.ap50 * 100:.1f} / {f1 * 100:.1f}")
                loss = f"{link.loss:.0%}{' in bursts' if link.bursty else ''}"
                whole, fraction = (np.mean(v) for v in ([o.fraction == 1.0 for o in ones], [o.fraction for o in ones]))
                console.print(
                    f"| `{stage}` | {loss} | {way} | {whole:.0%} | {fraction:.2f} | {cells[0]} | {cells[1]} |"
                )


def main() -> None:
    """Print the table of `docs/benchmarks/detection.md`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_data_option(parser)
    options = parser.parse_args()
    images = read_coco_images(options.data)
    sent = [send(images.bodies[i], int(i)) for i in track(images.val, "sending", transient=True)]
    figures(images, sent, Console(width=200, highlight=False, markup=False))


if __name__ == "__main__":
    main()
