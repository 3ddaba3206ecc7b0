"""What becomes of a graph's outputs: which are kept, and what the numbers of a classifier mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import onnx
from numpy.typing import NDArray

from hawkvision.core.errors import ConfigError
from hawkvision.model_zoo.own.graphs import parity
from hawkvision.model_zoo.own.graphs.conversion import OutputPlan
from hawkvision.model_zoo.own.graphs.graph_facts import GraphFacts, OutputFacts
from hawkvision.model_zoo.own.graphs.owner_facts import LOGITS_DECODER, OutputMeaning, OwnerFacts

ANY_SIDE: Final = 224
"""Where a graph takes any size, of the image that shows what its numbers are."""
_SORTED: Final = ("TopK", "ArgMax", "ArgMin", "NonMaxSuppression")
"""Operators after which numbers are no longer one per label, in the order of the labels."""


def names_of(facts: OwnerFacts, graph: GraphFacts) -> tuple[str, ...]:
    """The outputs that are used."""
    return tuple(facts.outputs) or tuple(output.name for output in graph.outputs)


def check_outputs(facts: OwnerFacts, graph: GraphFacts, decoder: str | None, where: str) -> None:
    """Check that outputs exist, and that those of a classifier can be logits or probabilities.

    Raises:
        ConfigError: naming the output, and what it is.
    """
    known = {output.name: output for output in graph.outputs}
    names = names_of(facts, graph)
    unknown = sorted(set(names) - known.keys())
    if unknown:
        raise ConfigError(f"--outputs: {where} has no output {unknown[0]!r}; it has {graph}")
    strange = [known[name] for name in names if not known[name].is_tensor_of_numbers]
    if strange and (decoder != LOGITS_DECODER or len(names) == 1):
        raise ConfigError(f"{where}: output {strange[0]}: expected a tensor of numbers{_instead(strange[0])}")
    if decoder == LOGITS_DECODER and len(names) == 1:
        output = known[names[0]]
        if output.maker in _SORTED or not output.is_float:
            raise ConfigError(
                f"{where}: output {output} is made by {output.maker or 'no operator'}: expected logits or "
                f"probabilities, one for each label in the order of the labels{_instead(output)}"
            )


def _instead(output: OutputFacts) -> str:
    if not output.source:
        return ""
    return f"; {output.maker} reads {output.source!r}, which `--outputs {output.source}` uses"


def is_ambiguous(facts: OwnerFacts, graph: GraphFacts, model: onnx.ModelProto, where: str) -> bool:
    """Whether the only output may be logits as well as probabilities."""
    names = names_of(facts, graph)
    if facts.output_meaning is not None or facts.decoder not in (None, LOGITS_DECODER) or len(names) != 1:
        return False
    output = next((each for each in graph.outputs if each.name == names[0]), None)
    if output is None or output.activation is not None or not output.is_float:
        return False
    session = parity.open_session(model.SerializeToString(), where)
    sizes = [size or ANY_SIDE for size in (graph.batch or 1, *graph.shape[1:])]
    values = np.random.default_rng(0).uniform(0, 255, sizes)
    try:
        (found,) = session.run([names[0]], {graph.input: values.astype(graph.type)})
    except Exception:  # noqa: BLE001 - another size may do; it is run again with the owner's
        return False
    rows = np.atleast_1d(found).reshape(sizes[0], -1)
    return parity.gives_probabilities(rows) and not np.allclose(rows.sum(axis=1), 1, atol=1e-3)


def plan_of_logits(
    output: OutputFacts, values: NDArray[Any], images: int, labels: Sequence[str], meaning: OutputMeaning | None,
    where: str,
) -> OutputPlan:  # fmt: skip
    """How the output of a classifier becomes logits.

    Args:
        output: the only one that is used.
        values: what it gives for images.
        images: their number.
        labels: of the task.
        meaning: as the owner says.
        where: names the file in errors.

    Raises:
        ConfigError: if there is not one number for each label.
    """
    rows = values.reshape(images, -1)
    single = len(labels) == 2 and rows.shape[1] == 1
    if rows.shape[1] != len(labels) and not single:
        raise ConfigError(
            f"{where}: output {output.name!r} gives {rows.shape[1]} numbers an image; there are {len(labels)} labels, "
            f"from {labels[0]!r} to {labels[-1]!r}{_count_hint(rows.shape[1], len(labels))}"
        )
    sums_to_one = parity.gives_probabilities(rows) and bool(np.allclose(rows.sum(axis=1), 1, atol=1e-3))
    probabilities = output.activation is None and (
        meaning == "probabilities" or (meaning is None and sums_to_one and not single)
    )
    return OutputPlan((output.name,), len(labels), probabilities, single)


def _count_hint(numbers: int, labels: int) -> str:
    if numbers == 1:
        return "; one number an image is that of the second of two labels, such as `other` and `cat`"
    if numbers == labels + 1:
        return "; a class of the background, if the model has one, needs a label, too"
    return ""
