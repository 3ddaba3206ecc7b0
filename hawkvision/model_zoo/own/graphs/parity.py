"""Compares a converted graph with the owner's, on images prepared as the owner says."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from hawkvision.core.errors import ArtifactError
from hawkvision.core.types import LOGITS, Pixels
from hawkvision.model_zoo.own.graphs.conversion import IMAGE, PREFIX, OutputPlan, prepared
from hawkvision.model_zoo.own.graphs.graph_facts import GraphFacts
from hawkvision.model_zoo.own.graphs.owner_facts import Preparation
from hawkvision.system.graph_limits import one_run
from hawkvision.system.onnx_runtime import ort

IMAGES: Final = 3
LIMIT: Final = 1e-3
"""Largest difference, as a share of the largest number: float32 sums in another order give about 1e-6."""
HALF_LIMIT: Final = 3e-2
"""The same for graphs of float16."""
RUNS: Final = 5
_NOISE: Final = re.compile(r"^\[ONNXRuntimeError\] : \d+ : \w+ : (/\S+:\d+ .*?\) (?=[A-Z]))?")

Arrays = dict[str, NDArray[Any]]


def open_session(model: bytes | str, where: str) -> Any:
    """An ONNX Runtime session of one thread on the CPU.

    Raises:
        ArtifactError: if the runtime refuses the model.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        with one_run(where):
            return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime's own exceptions derive from nothing narrower
        raise ArtifactError(f"{where}: ONNX Runtime cannot load the model: {_first_line(error)}") from error


def sample_pixels(height: int, width: int, n: int = IMAGES) -> Pixels:
    """Smooth random images (n, height, width, 3), the last one black."""
    coarse = np.random.default_rng(0).integers(0, 256, (n, -(-height // 8), -(-width // 8), 3), dtype=np.uint8)
    coarse[-1] = 0
    return np.ascontiguousarray(coarse.repeat(8, axis=1).repeat(8, axis=2)[:, :height, :width])


def outputs_of_owner(session: Any, graph: GraphFacts, taken: NDArray[Any], names: Sequence[str], where: str) -> Arrays:
    """What the owner's graph gives for prepared images, one at a time unless its batch is fixed.

    Raises:
        ArtifactError: if it does not run, or what it gives is not finite.
    """
    step = graph.batch or 1
    parts: list[list[NDArray[Any]]] = []
    for start in range(0, len(taken), step):
        batch = np.resize(taken[start : start + step], (step, *taken.shape[1:]))
        found = _run(session, names, {graph.input: batch}, where)
        parts.append([each[: len(taken) - start] if step > 1 else np.atleast_1d(each) for each in found])
    made = {name: np.concatenate([part[at] for part in parts]) for at, name in enumerate(names)}
    for name, values in made.items():
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            raise ArtifactError(f"{where}: output {name!r} gives numbers that are not finite; expected finite ones")
    return made


def inputs_as_served(model: bytes, graph: GraphFacts, wanted: Preparation, pixels: Pixels, where: str) -> NDArray[Any]:
    """What the nodes before the owner's graph make of images, which is checked to be what the owner says.

    The owner's graph is compared on these very numbers where it is quantised: the last bit of a number decides how it
    is rounded.

    Raises:
        ArtifactError: if it is not.
    """
    name = PREFIX + graph.input
    opened = onnx.load_from_string(model)
    opened.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    session = open_session(opened.SerializeToString(), where)
    taken = np.concatenate([_run(session, [name], {IMAGE: pixels[i : i + 1]}, where)[0] for i in range(len(pixels))])
    off = difference(taken, prepared(pixels, graph, wanted))
    if not off <= (HALF_LIMIT if graph.type == "float16" else LIMIT):
        raise ArtifactError(f"{where}: prepared images differ by {off:.2g} from what you say; this is a defect")
    return taken


def check_parity(
    session: Any, expected: Arrays, outputs: OutputPlan, pixels: Pixels, *, half: bool, where: str
) -> float:
    """The largest difference between what the converted graph gives and the owner's graph gave.

    Raises:
        ArtifactError: if it is too large, or the converted graph does not take several images.
    """
    names = [LOGITS] if outputs.logits is not None else list(outputs.names)
    try:
        found = dict(zip(names, _run(session, names, {IMAGE: pixels}, where), strict=True))
    except ArtifactError:
        parts = [_run(session, names, {IMAGE: pixels[at : at + 1]}, where) for at in range(len(pixels))]
        found = {name: np.concatenate([part[at] for part in parts]) for at, name in enumerate(names)}
    if outputs.logits is None:
        pairs = [(found[name], expected[name]) for name in names]
    else:
        pairs = [_comparable(found[LOGITS], expected[outputs.names[0]].astype(np.float64))]
    worst = max(difference(mine, theirs) for mine, theirs in pairs)
    if not worst <= (HALF_LIMIT if half else LIMIT):
        raise ArtifactError(
            f"{where}: the converted graph differs from the file by {worst:.2g} of the largest number on images "
            "prepared as you say; this is a defect of the conversion, or the graph is not deterministic"
        )
    return worst


def difference(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest difference as a share of the largest number, at least 1; infinite for other shapes."""
    if found.shape != expected.shape:
        return float("inf")
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    return float(np.abs(found.astype(np.float64) - expected.astype(np.float64)).max(initial=0.0)) / scale


def takes_batches(model: bytes, where: str, pixels: Pixels) -> bool:
    """Whether the graph gives each image of a batch what it gives it alone."""
    session = open_session(model, where)
    names = [output.name for output in session.get_outputs()]
    try:
        together = _run(session, names, {IMAGE: pixels}, where)
        alone = [_run(session, names, {IMAGE: pixels[at : at + 1]}, where) for at in range(len(pixels))]
        return all(
            difference(whole, np.concatenate([one[at] for one in alone])) <= LIMIT for at, whole in enumerate(together)
        )
    except (ArtifactError, ValueError):
        return False


def cpu_ms(model: bytes, where: str) -> float:
    """Processor time of one image in one thread: the least of a few runs, which a busy machine hardly changes."""
    session = open_session(model, where)
    _, height, width, _ = session.get_inputs()[0].shape
    pixels = sample_pixels(height, width, 1)
    names = [output.name for output in session.get_outputs()]
    spent = []
    for _ in range(RUNS + 1):
        before = time.thread_time()
        _run(session, names, {IMAGE: pixels}, where)
        spent.append(time.thread_time() - before)
    return min(spent[1:]) * 1e3


def gives_probabilities(values: NDArray[Any]) -> bool:
    """Whether all numbers are in 0..1, so that they may be probabilities."""
    return bool(((values >= 0) & (values <= 1)).all())


def _log_softmax(logits: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    logarithms: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logarithms


def _comparable(logits: NDArray[Any], theirs: NDArray[np.float64]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Logits in the terms of the owner's output, which may be logits or what an activation made of them."""
    theirs, mine = theirs.reshape(len(logits), -1), logits.astype(np.float64)
    if theirs.shape[1] < mine.shape[1]:
        mine = mine[:, 1:] - mine[:, :1]
    candidates = [mine, (1 + np.tanh(mine / 2)) / 2]
    if theirs.shape[1] > 1:
        candidates += [_log_softmax(mine), np.exp(_log_softmax(mine))]
    return min(candidates, key=lambda each: difference(each, theirs)), theirs


def _run(session: Any, names: Sequence[str], feed: Arrays, where: str) -> list[NDArray[Any]]:
    try:
        with one_run(where, max(map(len, feed.values()))):
            found: list[NDArray[Any]] = session.run(list(names), feed)
    except Exception as error:  # see above
        raise ArtifactError(f"{where}: the graph does not run: {_first_line(error)}") from error
    return found


def _first_line(error: Exception) -> str:
    """What the runtime says, without its code and the place in its source."""
    return _NOISE.sub("", str(error).splitlines()[0])[:400]
