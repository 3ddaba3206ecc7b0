"""What a request reports to the stream controllers and the auditor: scores and agreement with the datacenter."""

from __future__ import annotations

from edge.inference.edge_stage import EdgePrediction
from edge.monitoring.audits import Accepted
from edge.monitoring.stream import StageScore
from edge.serving.context import ServingContext
from edge.serving.image_request import ImageRequest
from hawkvision.core.escalation_api import EscalationReply
from hawkvision.core.types import Prediction


def score_of(image: ImageRequest, edge: EdgePrediction) -> float:
    """The edge's score, as the target compares it."""
    return image.stage.kind.confidence(edge.result.prediction) if image.route.by_confidence else edge.result.score


def below_target(image: ImageRequest, edge: EdgePrediction | None) -> bool:
    """Whether an edge prediction is below the target.

    A threshold that is raised only by accuracy debt does not count. A truncated ensemble always counts: its
    accuracy was never measured.
    """
    if edge is None or edge.result.truncated:
        return True
    controller = image.controllers.edge
    return score_of(image, edge) < (image.route.threshold if controller is None else controller.control.bar)


def update_controllers(
    context: ServingContext, image: ImageRequest, reply: EscalationReply, edge: EdgePrediction | None
) -> None:
    """Report the datacenter's reply, compared with the edge's prediction if there is one."""
    served, controllers = context.served, image.controllers
    reference, disagreement = reply.prediction, context.kind.disagreement
    by_reference, certified = reply.model == context.best, served.certified(reply, image.received)
    # A partial ensemble, another version, or less of the image than the edge used says nothing about the edge.
    comparable = served.serves(context.best) and reply.comparable and certified
    if controllers.edge is not None and edge is not None:
        known = by_reference and comparable and not edge.result.truncated
        found = disagreement(edge.result.prediction, reference) if known else None
        controllers.edge.escalated(score_of(image, edge), found)
    scores, accepted = _stage_scores(image, edge), None
    between = None
    if reply.passed_over is not None and served.passed_over_certified(reply, image.received):
        between = reply.passed_over.score, reply.passed_over.prediction
        if controllers.intermediate is not None:
            found = disagreement(between[1], reference) if comparable else None
            controllers.intermediate.escalated(between[0], found)
    elif not by_reference and certified and reply.score is not None and image.route.intermediate is not None:
        between = reply.score, reply.prediction
        accepted = None if controllers.intermediate is None else Accepted(controllers.intermediate, *between)
    if between is not None and controllers.intermediate_claims is not None:
        scores = (*scores, StageScore(controllers.intermediate_claims, *between))
    _consider(context, image, scores, reference if by_reference and comparable else None, accepted)


def record_unanswered(context: ServingContext, image: ImageRequest, edge: EdgePrediction) -> None:
    """Report a scored image that gets no answer. Without it, the sample of escalated images would be distorted."""
    if image.controllers.edge is not None:
        image.controllers.edge.escalated(score_of(image, edge), None)
    _consider(context, image, _stage_scores(image, edge))


def record_edge_answer(context: ServingContext, image: ImageRequest, edge: EdgePrediction, *, degraded: bool) -> None:
    """Report an answer of the edge; `degraded` if it is below the target."""
    controller, accepted = image.controllers.edge, None
    if controller is not None and degraded:
        controller.fell_short(score_of(image, edge))
    elif controller is not None:
        accepted = Accepted(controller, score_of(image, edge), edge.result.prediction)
    _consider(context, image, _stage_scores(image, edge), accepted=accepted)


def _stage_scores(image: ImageRequest, edge: EdgePrediction | None) -> tuple[StageScore, ...]:
    """The edge's outcome for its log. A truncated ensemble has none, for it is another stage than the certified one."""
    claims = image.controllers.edge_claims
    if claims is None or edge is None or edge.result.truncated:
        return ()
    return (StageScore(claims, score_of(image, edge), edge.result.prediction),)


def _consider(
    context: ServingContext,
    image: ImageRequest,
    scores: tuple[StageScore, ...],
    reference: Prediction | None = None,
    accepted: Accepted | None = None,
) -> None:
    """Offer the image to the auditor; `reference` is the reference stage's prediction, if it has answered."""
    if scores:
        context.auditor.consider(
            image.controllers, scores, image.body, image.trace, comparable=context.served.serves(context.best),
            reference=reference, accepted=accepted, received=image.received,
        )  # fmt: skip
