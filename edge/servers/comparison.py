"""Comparing the stages on an image that somebody sends for it: what an audit finds out, but no evidence of the node's.

A site certifies a folder of its images by what really runs in its node and its datacenter.
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from edge.serving.node import EdgeNode
from edge.serving.request import ImageRequest
from hawkvision.cascade.certification.profile import design_sha256
from hawkvision.core.errors import EscalationFailed, NotFound, NotReady

MOST_AT_ONCE: Final = 4
"""Comparisons of a node; they wait until no caller needs the datacenter."""
LONGEST_S: Final = 20.0
"""Time for the reference stage's answer."""


class Comparison(msgspec.Struct, frozen=True):
    """What the edge stage and the reference stage answer to an image."""

    task: Annotated[str, Meta(description="The task.")]
    edge: Annotated[str, Meta(description="The edge stage.")]
    best: Annotated[str, Meta(description="The reference stage.")]
    score: Annotated[float, Meta(description="The edge stage's score, which targets compare with their thresholds.")]
    answer: Annotated[dict[str, Any], Meta(description="What the edge stage answers, as far as it is compared.")]
    reference: Annotated[dict[str, Any], Meta(description="What the reference stage answers, likewise.")]
    disagreement: Annotated[float, Meta(description="How far they differ, 0 to 1.")]
    executions: Annotated[
        dict[str, list[str]], Meta(description="What ran each of them: backend, provider, precision, versions, device.")
    ]
    versions: Annotated[str, Meta(description="A hash of both stages, and of what the score depends on.")]
    design: Annotated[
        str, Meta(description="A hash of what certificates take as given: models, temperatures, thresholds in order.")
    ]


async def compare(node: EdgeNode, request: ImageRequest) -> Comparison:
    """Run the whole edge stage, and ask the reference stage as an audit does.

    Raises:
        NotFound: if the node has no datacenter.
        NotReady: if the reference stage of the profile's models does not answer in time. What executes the models may
            be another than certified: certificates of this node's answers cover it.
        Overloaded, RequestError: as for any image.
    """
    context, image = node.context, node.routed(request)
    guarantees, datacenter = context.guarantees, context.datacenter
    if datacenter is None:
        raise NotFound("this node has no datacenter, and so nothing to compare with")
    (profile, pair), versions = guarantees.pair(), guarantees.versions()
    edge = await context.executor.score(image, image.stage)
    try:
        async with asyncio.timeout(LONGEST_S):
            reply = await context.auditor.ask(datacenter, request.body, request.trace)
    except (TimeoutError, EscalationFailed) as error:
        raise NotReady(f"the reference stage {context.best} did not answer: {error or 'it does not run'}") from None
    ran = {pair.edge: image.stage.fingerprint, pair.best: None}
    if reply is not None and reply.complete and reply.model == context.best:
        ran[pair.best] = reply.fingerprint
    executions = {name: context.served.versions.executions_of(name, stated) for name, stated in ran.items()}
    if reply is None or versions != guarantees.versions() or not all(executions.values()):
        raise NotReady("the stages do not run in the versions of the profile, or have just changed")
    reference = reply.prediction
    kind = context.kind
    return Comparison(
        context.task,
        pair.edge,
        pair.best,
        edge.score,
        kind.encode_compared(edge.prediction),
        kind.encode_compared(reference),
        kind.disagreement(edge.prediction, reference),
        {name: sorted(found) for name, found in executions.items()},
        versions,
        design_sha256(profile, (pair,)),
    )
