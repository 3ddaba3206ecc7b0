"""Requests and replies between an edge node and the datacenter tier, as they travel.

    POST /v1/infer
        X-HawkVision-Wire: 2                   the version of this wire; another is refused
        X-HawkVision-Task: imagenet            default: the tier's own task
        X-HawkVision-Variant: ensemble         a stage of the cascade; default: the best served
        X-HawkVision-Deadline-Ms: 180.0        time left when sent; absent: no deadline
        X-HawkVision-Top-K: 5
        X-HawkVision-Progressive: 1            accept replies by some members of an ensemble meanwhile
        X-HawkVision-Accept-Score: 0.913       these three together: the variant runs first; if its score
        X-HawkVision-Score: margin             of this name is below the accept score, the otherwise-stage
        X-HawkVision-Otherwise: ensemble       answers
        traceparent: 00-…                      W3C trace context
        X-Request-Id: …                        the caller's, or the trace id (`core.logs`); not over datagrams
        Authorization: Bearer KEY              if the tier has a key
        <the encoded image: the caller's own bytes, or a smaller image made from it (`imaging.downscale`)>

    200 {"top_k": [{"index": 281, "confidence": 0.83}, …],     first the fields of the task's kind
         "model": "ensemble",
         "timing_ms": {"decode": …, "queue": …, "infer": …, "total": …, "first": …}, "batch_size": 3,
         "score": null, "passed_over": null, "complete": true, "fingerprint": "…/int8"}

    GET /v1/transport
    200 {"datagram": {"port": 8091, "certificate": "-----BEGIN CERTIFICATE-----…", "name": "…", "version": 1}}
                                               null if the tier does not listen for datagrams

    GET /v1/stages
    200 {"task": "imagenet", "best": "ensemble",
         "stages": [{"name": "ensemble", "members": [{"name": "resnet50", "sha256": "…"}, …],
                     "fingerprint": "…", "ran": "…/int8"}, …]}

Errors are `{"error", "code"}` with the statuses of `hawkvision.core.errors`. A deadline is sent as remaining time,
because the clocks of edge and datacenter need not agree. The edge subtracts the time on the link.

A certificate may cover three levels: edge stage, intermediate stage, reference stage. The tier then takes the second
decision within one round trip:

    score of the variant ≥ Accept-Score ──►  200, "model": the variant,         "score": its own
    else, within the same deadline      ──►  200, "model": the otherwise-stage, "score": its own,
                                             "passed_over": {"index": 282, "score": 0.41}   the variant's result

`fingerprint` states what computed the answer, as stamped by the replicas that ran the models
(`hawkvision.models.fingerprints`); `passed_over` has its own. An answer without one is never certified. In
`/v1/stages`, `fingerprint` follows from the tier's settings, and `ran` is what the replicas state.

A score is one of the task's kind (`TaskKind.scores`), computed in float32. The comparison widens it to float64, and the
header writes the threshold with enough digits to restore the same float64, so the tier accepts exactly the images that
an offline computation accepts. An intermediate stage whose answers must not count has the Accept-Score `inf`.

A progressive request accepts replies by some members of an ensemble before its deadline. The body may then have several
such objects, one per line (`application/jsonl`), each from more members and views than the one before. The last one is
`"complete": true`, unless an error occurred after the first, or the deadline passed. Certificates do not cover
incomplete replies. `first` says when the first reply was ready.

Over the datagram transport (`hawkvision.transport`) a request has the same fields. The fields that many images share
are its template, a JSON object with `task`, `variant` and, for an intermediate stage, `score` and `otherwise`. The
fields of one image are its meta, big-endian:

     0        1        2                 4           20          28       29                    37
    ┌────────┬────────┬─────────────────┬───────────┬───────────┬────────┬─────────────────────┐
    │version │ flags  │ top_k           │ trace id  │ span id   │ trace  │ accept score        │
    │ 1      │ 1: mid │ u16             │ 16 bytes  │ 8 bytes   │ flags  │ float64, if middle  │
    │        │ 2: prg │                 │           │           │        │                     │
    └────────┴────────┴─────────────────┴───────────┴───────────┴────────┴─────────────────────┘

The fragments carry the deadline. Incomplete replies to a progressive request (flag 2) come as interims of at most one
datagram, with some twenty classes. The answer is the complete reply, or the last one just before the deadline. Replies
and errors have the same bodies; errors add their `status`.
"""

from __future__ import annotations

from hawkvision.core.escalation_api.listings import (
    STAGES_PATH as STAGES_PATH,
)
from hawkvision.core.escalation_api.listings import (
    TRANSPORT_PATH as TRANSPORT_PATH,
)
from hawkvision.core.escalation_api.listings import (
    DatagramEndpoint as DatagramEndpoint,
)
from hawkvision.core.escalation_api.listings import (
    ListedStage as ListedStage,
)
from hawkvision.core.escalation_api.listings import (
    StageList as StageList,
)
from hawkvision.core.escalation_api.listings import (
    StageMember as StageMember,
)
from hawkvision.core.escalation_api.listings import (
    Transports as Transports,
)
from hawkvision.core.escalation_api.parsing import (
    check_wire_version as check_wire_version,
)
from hawkvision.core.escalation_api.parsing import (
    parse_escalation_datagram as parse_escalation_datagram,
)
from hawkvision.core.escalation_api.parsing import (
    parse_escalation_headers as parse_escalation_headers,
)
from hawkvision.core.escalation_api.reply import (
    EscalationReply as EscalationReply,
)
from hawkvision.core.escalation_api.reply import (
    EscalationTiming as EscalationTiming,
)
from hawkvision.core.escalation_api.reply import (
    IntermediateResult as IntermediateResult,
)
from hawkvision.core.escalation_api.request import (
    ACCEPT_SCORE_HEADER as ACCEPT_SCORE_HEADER,
)
from hawkvision.core.escalation_api.request import (
    DEADLINE_HEADER as DEADLINE_HEADER,
)
from hawkvision.core.escalation_api.request import (
    INFER_PATH as INFER_PATH,
)
from hawkvision.core.escalation_api.request import (
    MAX_DEADLINE_MS as MAX_DEADLINE_MS,
)
from hawkvision.core.escalation_api.request import (
    MAX_TOP_K as MAX_TOP_K,
)
from hawkvision.core.escalation_api.request import (
    META_VERSION as META_VERSION,
)
from hawkvision.core.escalation_api.request import (
    OTHERWISE_HEADER as OTHERWISE_HEADER,
)
from hawkvision.core.escalation_api.request import (
    PROGRESSIVE_HEADER as PROGRESSIVE_HEADER,
)
from hawkvision.core.escalation_api.request import (
    PROGRESSIVE_TYPE as PROGRESSIVE_TYPE,
)
from hawkvision.core.escalation_api.request import (
    SCORE_HEADER as SCORE_HEADER,
)
from hawkvision.core.escalation_api.request import (
    SCORE_NAME as SCORE_NAME,
)
from hawkvision.core.escalation_api.request import (
    TASK_HEADER as TASK_HEADER,
)
from hawkvision.core.escalation_api.request import (
    TOP_K_HEADER as TOP_K_HEADER,
)
from hawkvision.core.escalation_api.request import (
    TRACE_HEADER as TRACE_HEADER,
)
from hawkvision.core.escalation_api.request import (
    VARIANT_HEADER as VARIANT_HEADER,
)
from hawkvision.core.escalation_api.request import (
    WIRE_HEADER as WIRE_HEADER,
)
from hawkvision.core.escalation_api.request import (
    WIRE_VERSION as WIRE_VERSION,
)
from hawkvision.core.escalation_api.request import (
    EscalationRequest as EscalationRequest,
)
from hawkvision.core.escalation_api.request import (
    IntermediateOffer as IntermediateOffer,
)
