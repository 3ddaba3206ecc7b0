"""The commands that ask an edge node what images show."""

from __future__ import annotations

import colorsys
import glob
import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Unpack

from hawkvision.cli.options import AskOptions, DetectOptions
from hawkvision.core.errors import BadImage, ConfigError, HawkVisionError
from hawkvision.system.terminal import on_one_line, plain

if TYPE_CHECKING:
    from hawkvision.cli.answer_table import AnswerTable, CsvRows
    from hawkvision.client.batch import Outcome
    from hawkvision.client.request import ClassifyFields


def classify(given: AskOptions) -> int:
    """Classify images with an edge node."""
    return _ask(given, "classify_batch", top_k=1)


def detect(given: DetectOptions) -> int:
    """Find objects in images with an edge node, and draw their boxes."""
    return _ask(given, "detect_batch", draw=given.draw)


def infer(given: AskOptions) -> int:
    """Ask an edge node about images, with a task of any kind."""
    return _ask(given, "infer_batch")


def _ask(
    given: AskOptions,
    call: Literal["classify_batch", "detect_batch", "infer_batch"],
    *,
    draw: Path | None = None,
    **more: Unpack[ClassifyFields],
) -> int:
    """Ask about all images, and print, write and draw what comes."""
    from hawkvision.cli.answer_table import AnswerTable, csv_rows
    from hawkvision.cli.classify import drawing, drawing_files
    from hawkvision.client.blocking import Client
    from hawkvision.models.datasets import image_files

    files, table = image_files(expanded(given.images)), AnswerTable()
    drawn = None if draw is None else drawing_files(draw, files)
    with ExitStack() as stack:
        rows = None if given.out is None else stack.enter_context(csv_rows(given.out, boxes=call != "classify_batch"))
        client = stack.enter_context(
            Client(
                given.url, api_key=given.api_key, transport="datagram" if given.datagram else "http", ca=given.ca,
                certificate=given.certificate,
            )
        )  # fmt: skip
        if given.wait:
            client.wait_ready(given.wait)
        asked = getattr(client, call)(
            files, concurrency=given.concurrency, min_accuracy=given.min_accuracy,
            max_accuracy_drop=given.max_accuracy_drop, quality=given.quality, deadline_ms=given.deadline_ms,
            on_miss=given.on_miss, stream=given.stream, task=given.task, **more,
        )  # fmt: skip
        outcomes = _with_progress(files, asked)
        failures = report(drawing(outcomes, drawn), table, rows, as_json=given.json)
    if not given.json and given.out is None and table.rows:
        table.show()
    if given.out is not None:
        print(f"{len(files) - failures} answers and {failures} errors written to {given.out}")
    return int(failures > 0)


def _with_progress(files: Sequence[Path], outcomes: Iterable[Outcome]) -> Iterable[tuple[Path, Outcome]]:
    """Each file and its outcome, with a progress bar on a terminal if there are several."""
    from rich.console import Console
    from rich.progress import track

    on_stderr = Console(stderr=True)
    hidden = len(files) == 1 or not on_stderr.is_terminal
    shown = track(outcomes, "asking", len(files), console=on_stderr, transient=True, disable=hidden)
    return zip(files, shown, strict=True)


def report(outcomes: Iterable[tuple[Path, Outcome]], table: AnswerTable, rows: CsvRows | None, *, as_json: bool) -> int:
    """Print or write each outcome, or add it to the table. Returns the number of errors."""
    failures = 0
    for file, outcome in outcomes:
        if isinstance(outcome, Exception):
            failures += 1
            print(f"error: {on_one_line(f'{file}: {_reason(outcome)}')}", file=sys.stderr)
            if rows is not None:
                rows.failure(file, outcome)
            continue
        if rows is not None:
            rows.answer(file, outcome)
        if as_json:
            print(json.dumps({"image": str(file), **outcome.to_json()}))
        elif rows is None:
            table.add(file.name, outcome)
    return failures


def _reason(error: Exception) -> str:
    """Why there is no answer, for a line that names the file."""
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)


def expanded(words: Sequence[str]) -> list[Path]:
    """The paths, with each pattern replaced by the files that match it, sorted by name.

    A word that names an existing file is no pattern.

    Raises:
        ConfigError: if a pattern matches no file, or a word is empty.
    """
    paths: list[Path] = []
    for word in words:
        if not word:  # a variable that is not set, and `Path("")` is the working folder
            raise ConfigError("images: expected files, folders or patterns, got an empty word")
        if Path(word).exists() or not glob.has_magic(word):
            paths.append(Path(word))
            continue
        found = sorted(glob.glob(word, recursive=True))  # noqa: PTH207 - Path.glob takes no absolute patterns
        if not found:
            raise ConfigError(f"{word}: no file matches this pattern")
        paths += map(Path, found)
    return paths


if TYPE_CHECKING:
    from hawkvision.client.batch import Outcome

DRAWN: Final = (".jpg", ".jpeg", ".png", ".webp")
"""Endings of files that boxes are drawn into."""
GOLDEN: Final = 0.618034
"""Share of the colour wheel between two classes, so that neighbouring indices differ."""
LEAST_TEXT: Final = 0.4
"""Scale of the text on small images."""


def drawing_files(draw: Path, files: Sequence[Path]) -> list[Path]:
    """Where each image is drawn: below the folder `draw`, or of one image into that file. Makes the folder.

    Raises:
        ConfigError: if there can be no such folder or file, two images have one name, or an image would be overwritten.
    """
    into_file = draw.suffix.lower() in DRAWN and not draw.is_dir()
    if into_file and len(files) > 1:
        raise ConfigError(f"--draw: expected a folder for {len(files)} images, got the file {draw}")
    if not into_file and len(files) == 1 and draw.suffix and not draw.is_dir():
        raise ConfigError(f"--draw: {draw}: expected a folder, or a name that ends in .jpg, .png or .webp")
    if not into_file and len({file.name for file in files}) < len(files):
        raise ConfigError("--draw: expected images of different names, because one folder takes all of them")
    drawn = [draw] if into_file else [draw / file.name for file in files]
    images = {file.resolve() for file in files}
    for each in drawn:
        if each.resolve() in images:
            raise ConfigError(f"--draw: {each} is one of the images; expected a place that overwrites none")
    folder = draw.parent if into_file else draw
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--draw: {folder}: {error.strerror}") from None
    return drawn


def drawing(outcomes: Iterable[tuple[Path, Outcome]], drawn: Sequence[Path] | None) -> Iterator[tuple[Path, Outcome]]:
    """The outcomes; each answer is drawn, and is an error if that fails. With None nothing is drawn."""
    for number, (file, outcome) in enumerate(outcomes):
        if drawn is None or isinstance(outcome, Exception):
            yield file, outcome
            continue
        try:
            _draw(outcome.to_json()["objects"], file, drawn[number])
        except (HawkVisionError, OSError) as error:
            yield file, error
        else:
            yield file, outcome


def _draw(objects: Iterable[Mapping[str, Any]], source: Path, target: Path) -> None:
    """Write the upright image of `source` with the objects' boxes, labelled in ASCII, in the format of `target`.

    Raises:
        BadImage: if the image cannot be read, or not be written in that format.
        OSError: if a file cannot be read or written.
    """
    import cv2
    import numpy as np

    pixels = cv2.imdecode(np.frombuffer(source.read_bytes(), np.uint8), cv2.IMREAD_COLOR)
    if pixels is None:
        raise BadImage(f"{source}: boxes are drawn into JPEG, PNG and WebP images")
    height, width = pixels.shape[:2]
    line = max(1, round(min(height, width) / 250))
    scale = max(LEAST_TEXT, min(height, width) / 900)
    for each in objects:
        text = plain(f"{each['label']} {each['confidence']:.2f}")
        x1, y1, x2, y2 = each["box"]
        left, top, right, bottom = round(x1 * width), round(y1 * height), round(x2 * width), round(y2 * height)
        colour = [round(255 * part) for part in colorsys.hsv_to_rgb(each["index"] * GOLDEN % 1.0, 0.9, 0.75)][::-1]
        cv2.rectangle(pixels, (left, top), (right, bottom), colour, line)
        (across, up), _ = cv2.getTextSize(text, cv2.FONT_HERSHEY_SIMPLEX, scale, line)
        base = max(top, up + 2 * line)
        cv2.rectangle(pixels, (left, base - up - 2 * line), (left + across, base), colour, cv2.FILLED)
        white = (255, 255, 255)
        cv2.putText(pixels, text, (left, base - line), cv2.FONT_HERSHEY_SIMPLEX, scale, white, line, cv2.LINE_AA)
    try:
        done, written = cv2.imencode(target.suffix or ".jpg", pixels)
    except cv2.error:
        done = False
    if not done:
        raise BadImage(f"{target}: expected a name that ends in .jpg, .png or .webp")
    target.write_bytes(written.tobytes())
