"""`python -m tests.bench.robustness.odd_images [FOLDER …]`: are odd image files decoded as by a reference decoder?

Asked are the files of the folders, each once; what `--mutate` surgeons make of some of them; and files made on the spot
(`tests.odd_images`). The reference is Pillow, strict (what it takes without its leniency for cut files; of JPEG what
libjpeg's `djpeg` says nothing against either, where that is installed) and lenient. Compared are the pixels that
production code decodes at full scale, and what a real node answers: status and label, of the file and of the
reference's pixels as PNG, for which the reference decodes a JPEG at the scale that production code does.

    read as the reference   refused, and so does the reference   refused by policy (cut off, limits, formats)
    ─ what should be none: refused though the reference takes it, read otherwise, another label, 5xx ─
"""

from __future__ import annotations

import argparse
import hashlib
import http.client
import io
import json
import random
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import numpy as np
from PIL import Image, ImageFile, ImageOps
from rich.console import Console
from rich.table import Table

from hawkvision.core.errors import RequestError, TooLarge, UnsupportedMedia
from hawkvision.core.types import Pixels
from hawkvision.imaging.preprocessing import decode, probe
from hawkvision.system.child_server import running
from tests.odd_images import bad_chunk, chunk, odd_jpegs, odd_pngs, profile, scan_start, segment

MAX_PIXELS: Final = 50_000_000
MAX_BYTES: Final = 10 * 1024 * 1024
NEAR: Final = 3
"""Levels by which two decoders of the same bytes may differ: in rounding, of colours that are converted."""
MIN_SIDE: Final = 448
"""Pixels of the shorter side that are decoded at least for the cascade's edge stage, which takes in 224."""
JPEG, PNG = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True, slots=True)
class DecodedImage:
    """A file, and one that shows the same where that is known; `cut` where something is missing of it."""

    name: str
    body: bytes
    twin: bytes | None = None
    cut: bool = False


def files(folders: Sequence[Path], most: int) -> Iterator[DecodedImage]:
    """Each file once, by its content; those in formats that are read first."""
    seen: set[bytes] = set()
    paths = sorted(path for folder in folders for path in folder.rglob("*") if path.is_file())
    random.Random(0).shuffle(paths)
    for path in sorted(paths, key=lambda path: path.suffix.lower() == ".png"):
        body = path.read_bytes() if path.stat().st_size <= MAX_BYTES else b""
        digest = hashlib.sha256(body).digest()
        if body and digest not in seen and len(seen) < most:
            seen.add(digest)
            yield DecodedImage(path.name, body)


def made() -> Iterator[DecodedImage]:
    """Files of each kind that `tests.odd_images` knows."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (6, 9, 3), np.uint8)
    pixels = np.asarray(Image.fromarray(coarse).resize((171, 118), Image.Resampling.BICUBIC))
    for kind, odd in {**odd_jpegs(pixels), **odd_pngs(pixels)}.items():
        yield DecodedImage(f"made: {kind}", odd.body, odd.twin)


def mutated(asked: DecodedImage, rng: random.Random) -> Iterator[DecodedImage]:
    """What becomes of a sound file in careless hands, and what in broken ones."""
    body, end = asked.body, len(asked.body)
    if body.startswith(JPEG) and body.endswith(b"\xff\xd9") and body.count(b"\xff\xda") == 1:
        start = scan_start(body)
        inner = rng.randrange(start, end - 2)
        whole = {
            "no end": body[:-2],
            "tag": body[:-2] + rng.randbytes(8).replace(b"\xff", b"\xfe"),
            "padding": body[:-2] + bytes(rng.randrange(1, 3000)) + body[-2:],
            "profile": body[:2] + profile(0, 1) + body[2:],
            "stray": body[:2] + b"stray" + body[2:],
            "short APP": body[:2] + segment(0xE1, b"Ex") + b"\xff\xe2\0\0" + body[2:],
        }
        cuts = {"cut": body[:inner], "cut, end": body[:inner] + b"\xff\xd9"}
    elif body.startswith(PNG) and body.endswith(b"IEND\xaeB`\x82"):
        at = body.index(b"IDAT") - 4
        inner = rng.randrange(at + 8, end - 12)
        whole = {
            "no end": body[:-12],
            "comment": body[:at] + bad_chunk(b"tEXt", b"a\0b") + body[at:],
            "profile": body[:at] + chunk(b"zTXt", b"a\0\0junk") + body[at:],
            "tag": body[:-12] + b"0123456789abcdefghijk",
        }
        cuts = {"cut": body[:inner]}
    else:
        return
    yield from (DecodedImage(f"{asked.name}: {kind}", odd, body) for kind, odd in whole.items())
    yield from (DecodedImage(f"{asked.name}: {kind}", odd, body, cut=True) for kind, odd in cuts.items())


def reference(body: bytes, *, lenient: bool, factor: int = 1) -> Pixels | None:
    """Pillow's pixels, upright, alpha on white, of a JPEG at 1/`factor` of its size; None if it refuses."""
    ImageFile.LOAD_TRUNCATED_IMAGES = lenient
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            image: Image.Image = Image.open(io.BytesIO(body))
            if image.width * image.height > MAX_PIXELS:
                return None
            image.draft(None, (image.width // factor, image.height // factor))
            image.load()
            image = ImageOps.exif_transpose(image)
            if image.mode.startswith("I;16"):
                return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, -1)
            if image.mode == "I" and body.startswith(PNG):
                return np.repeat((np.asarray(image) >> 8).astype(np.uint8)[..., None], 3, -1)
            if "transparency" in image.info or "A" in image.getbands():
                above = image.convert("RGBA")
                image = Image.alpha_composite(Image.new("RGBA", above.size, "white"), above)
            return np.asarray(image.convert("RGB"))
    except Exception:  # noqa: BLE001 - whatever it does not like
        return None
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = False


def complained_of(body: bytes) -> bool:
    """Whether a stricter tool than Pillow, which hides libjpeg's warnings, says something against a file."""
    command = ["djpeg", "-outfile", "/dev/null"] if body.startswith(JPEG) else []
    if not command or shutil.which(command[0]) is None:
        return False
    ran = subprocess.run(command, input=body, capture_output=True, check=False)
    return ran.returncode != 0 or bool(ran.stderr)


def factor_of(body: bytes) -> int:
    """By what production code divides a JPEG's sides for the node's edge stage."""
    header = probe(body)
    shorter = min(header.width, header.height)
    factors = (8, 4, 2) if body.startswith(JPEG) else ()
    return next((factor for factor in factors if -(-shorter // factor) >= MIN_SIDE), 1)


def ours(body: bytes) -> Pixels | RequestError:
    """What production code decodes at full scale."""
    try:
        header = probe(body)
        return decode(body, header, max_pixels=MAX_PIXELS, min_side=sys.maxsize)
    except RequestError as error:
        return error


def verdict(asked: DecodedImage) -> tuple[str, str]:
    """What came of a file, and what to say of it if that is not as it should be."""
    got = ours(asked.body)
    truth = reference(asked.twin or asked.body, lenient=False)
    if isinstance(got, RequestError):
        if asked.cut:
            return "refused: cut off", ""
        if isinstance(got, TooLarge):
            return "refused: limits", ""
        if isinstance(got, UnsupportedMedia):
            return "refused: format", got.message if truth is not None else ""
        if truth is None:
            lenient = reference(asked.body, lenient=True)
            return ("refused, as the reference" if lenient is None else "refused: cut off"), ""
        if asked.twin is None and complained_of(asked.body):
            return "refused: reference warns", got.message
        return "REFUSED", got.message
    if truth is None:
        truth = reference(asked.body, lenient=True)
        if truth is None:
            return "read, the reference refuses", ""
    if asked.cut and got.shape == truth.shape and (got != truth).any():
        return "READ THOUGH CUT", f"{(got != truth).any(-1).mean():.1%} of pixels differ"
    if got.shape != truth.shape:
        return "READ OTHERWISE", f"{got.shape} instead of {truth.shape}"
    furthest = int(np.abs(got.astype(np.int16) - truth).max())
    if furthest > NEAR:
        return "READ OTHERWISE", f"differs by {furthest} levels, {(np.abs(got.astype(int) - truth) > NEAR).mean():.2%}"
    return ("read as the reference" if not furthest else "read as the reference, nearly"), ""


def answered(connection: http.client.HTTPConnection, body: bytes) -> tuple[int, str]:
    """Status, and label or error, of a node's answer."""
    connection.request("POST", "/v1/classify?quality=fast", body, {"Content-Type": "application/octet-stream"})
    reply = connection.getresponse()
    said = json.loads(reply.read())
    return reply.status, said["label"] if reply.status == 200 else said["error"]


def as_png(pixels: Pixels) -> bytes:
    """Pixels for a node."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=1)
    return out.getvalue()


def report(everything: Sequence[DecodedImage], url: str | None) -> int:
    """Print what came of everything; how many files were not treated as they should be."""
    counts: Counter[tuple[str, str]] = Counter()
    faults: list[tuple[str, str, str]] = []
    place = urlsplit(url) if url else None
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=60) if place else None
    for asked in everything:
        kind = "made" if asked.name.startswith("made: ") else "mutated" if asked.twin is not None else "file"
        outcome, why = verdict(asked)
        counts[outcome, kind] += 1
        if outcome.isupper() or why:
            faults.append((outcome, asked.name, why))
        if connection is None:
            continue
        status, said = answered(connection, asked.body)
        counts[f"node: {status}", kind] += 1
        if status >= 500:
            faults.append((f"NODE {status}", asked.name, said))
        same = asked.twin or asked.body
        truth = reference(same, lenient=True, factor=factor_of(same)) if status == 200 else None
        if truth is not None and len(png := as_png(truth)) <= MAX_BYTES:
            expected = answered(connection, png)
            counts["node: same label" if expected == (200, said) else "NODE: ANOTHER LABEL", kind] += 1
            if expected != (200, said):
                faults.append(("NODE: ANOTHER LABEL", asked.name, f"{said} instead of {expected}"))
    table = Table("outcome", "files", "mutated", "made", title=f"{len(everything)} files")
    for outcome in sorted({outcome for outcome, _ in counts}):
        table.add_row(outcome, *(str(counts[outcome, kind]) for kind in ("file", "mutated", "made")))
    console = Console(width=160)
    console.print(table)
    for fault in sorted(faults):
        console.print(*fault, sep=" | ", markup=False)
    return sum(fault[0].isupper() for fault in faults)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folders", nargs="*", type=Path)
    parser.add_argument("--most", type=int, default=2_000, help="files of the folders that are asked")
    parser.add_argument("--mutate", type=int, default=300, help="files whose mutations are sent as well")
    parser.add_argument("--no-node", action="store_true", help="compare pixels only")
    chosen = parser.parse_args(argv)
    Image.MAX_IMAGE_PIXELS = None
    asked = list(files(chosen.folders, chosen.most))
    rng = random.Random(0)
    small = [each for each in asked if len(each.body) < 400_000 and reference(each.body, lenient=False) is not None]
    drawn = rng.sample(small, min(chosen.mutate, len(small)))
    everything = [*asked, *(odd for each in drawn for odd in mutated(each, rng)), *made()]
    if chosen.no_node:
        return min(1, report(everything, None))
    with running("edge", "--port", "0") as node:
        return min(1, report(everything, node.url))


if __name__ == "__main__":
    sys.exit(main())
