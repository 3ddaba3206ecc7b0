"""What an operator reads when a replica does not start."""

from __future__ import annotations

import traceback

from hawkvision.core.errors import ArtifactError, BackendError
from hawkvision.datacenter.deployment.presence import cause_of


def traced(error: Exception) -> str:
    """As Serve reports a replica whose start raised this: the traceback within a sentence and another traceback."""
    try:
        raise error
    except Exception:  # noqa: BLE001
        inner = traceback.format_exc()
    return f"The deployment failed to start 3 times. Error:\nray::ServeReplica.initialize()\nRuntimeError: {inner}\n"


def test_the_error_of_ours_is_said_without_the_traceback_around_it() -> None:
    assert cause_of(traced(ArtifactError("/models/a.onnx: the model file is missing"))) == (
        "/models/a.onnx: the model file is missing"
    )


def test_the_last_of_several_errors_is_the_reason() -> None:
    assert cause_of(traced(ArtifactError("first")) + traced(BackendError("no such provider"))) == "no such provider"


def test_a_replica_that_was_killed_at_its_start_is_said_to_have_ended() -> None:
    said = "The deployment failed to start 3 times in a row. See controller logs for details. Error:\nActorDiedError()"
    assert cause_of(said) == "the process ended before it served; was it killed for memory?"


def test_another_message_is_said_whole_in_one_line() -> None:
    assert cause_of("no node has\n 64 CPUs") == "no node has 64 CPUs"
