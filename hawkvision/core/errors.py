"""Every error HawkVision raises on purpose, with the stable code that callers may match on.

    HawkVisionError
    ├── RequestError            the caller can mend it; each carries an HTTP status hint
    │   ├── BadImage            400 bad_image          the bytes are no image we can decode
    │   ├── BadField            400 bad_field          an unknown, malformed or contradictory field
    │   ├── Unauthorized        401 unauthorized       missing or wrong key
    │   ├── Forbidden           403 forbidden          the key is known, and has not the scope
    │   ├── NotFound            404 not_found          no such path or task
    │   ├── MethodNotAllowed    405 method_not_allowed
    │   ├── RequestTimeout      408 request_timeout    the headers or the body did not arrive in time
    │   ├── TooLarge            413 too_large          too many bytes or too many pixels
    │   ├── UriTooLong          414 uri_too_long       the URL exceeds its bound
    │   ├── UnsupportedMedia    415 unsupported_media  a format we do not read
    │   ├── TargetUnreachable   422 target_unreachable the cascade cannot guarantee that much
    │   └── HeadersTooLarge     431 headers_too_large  request line and headers exceed their bound
    ├── ServiceError            the caller may try again
    │   ├── Overloaded          429 overloaded         a bounded queue is full; carries retry_after_s
    │   ├── InternalError       500 internal           our fault; the log has the details
    │   ├── NotReady            503 not_ready          still loading, draining, or out of connections
    │   └── DeadlineMissed      504 deadline_missed    with on_miss=fail, or if decoding takes longer than is left
    ├── ConfigError             a setting is unknown, malformed or contradictory
    ├── ManifestError           a manifest or profile breaks its schema
    ├── ArtifactError           a model file is missing, corrupt or of another build
    ├── BackendError            a backend cannot load or run a model
    │   └── BackendUnavailable  503 unavailable        its device does not answer now, and may later
    ├── CompileError            a model that the FPGA compiler cannot take, or code that no compiler here can make
    └── EscalationFailed        the datacenter tier did not answer; never shown to callers as an error

The status is a hint for the servers (HTTP, gRPC); nothing here knows about any protocol.
Every error survives pickling, because Ray carries them between processes.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import msgspec

MALFORMED: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What `msgspec` raises for a malformed document; RecursionError for deep nesting."""


class HawkVisionError(Exception):
    """Base of all errors. The message says what happened, what was expected and where."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def body(self) -> dict[str, Any]:
        """The error body of every server."""
        return {"error": self.message, "code": self.code}


class RequestError(HawkVisionError):
    """The request cannot be answered as it stands."""

    status = 400


class BadImage(RequestError):
    """The body is not an image that can be decoded."""

    code = "bad_image"


class BadField(RequestError):
    """A field is unknown, malformed, given twice or contradicts another."""

    code = "bad_field"


class Unauthorized(RequestError):
    """The key is missing or wrong."""

    code = "unauthorized"
    status = 401


class Forbidden(RequestError):
    """The key is known, but its scopes do not cover the request."""

    code = "forbidden"
    status = 403


class NotFound(RequestError):
    """No such path, or no such task on this node."""

    code = "not_found"
    status = 404


class MethodNotAllowed(RequestError):
    """The path exists, but not for this method."""

    code = "method_not_allowed"
    status = 405


class RequestTimeout(RequestError):
    """The headers or the body did not arrive in time."""

    code = "request_timeout"
    status = 408


class TooLarge(RequestError):
    """The body or the image exceeds a limit."""

    code = "too_large"
    status = 413


class UriTooLong(RequestError):
    """The URL exceeds a limit."""

    code = "uri_too_long"
    status = 414


class UnsupportedMedia(RequestError):
    """The server does not read this format."""

    code = "unsupported_media"
    status = 415


class TargetUnreachable(RequestError):
    """The cascade cannot reach the target; `maximum` is the most that it can."""

    code = "target_unreachable"
    status = 422

    def __init__(self, message: str, maximum: float) -> None:
        super().__init__(message)
        self.maximum = maximum

    def __reduce__(self) -> tuple[type[TargetUnreachable], tuple[str, float]]:
        return type(self), (self.message, self.maximum)

    def body(self) -> dict[str, Any]:
        """The error body with the largest attainable value of the field."""
        return {**super().body(), "maximum": self.maximum}


class HeadersTooLarge(RequestError):
    """The request line and headers exceed a limit."""

    code = "headers_too_large"
    status = 431


class ServiceError(HawkVisionError):
    """The service cannot answer now."""

    status = 503


class Overloaded(ServiceError):
    """A bounded queue is full. Retry after `retry_after_s` seconds."""

    code = "overloaded"
    status = 429

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[type[Overloaded], tuple[str, float]]:
        return type(self), (self.message, self.retry_after_s)


class InternalError(ServiceError):
    """A defect of the server, counted and logged where it was caught."""

    code = "internal"
    status = 500


class NotReady(ServiceError):
    """Models are still loading, the node is draining, or all connections are in use."""

    code = "not_ready"


class DeadlineMissed(ServiceError):
    """The deadline passed and the caller chose `on_miss=fail`, or decoding alone takes longer than the deadline."""

    code = "deadline_missed"
    status = 504


class ConfigError(HawkVisionError):
    """A setting is unknown, malformed or contradictory."""

    code = "bad_config"


class ManifestError(HawkVisionError):
    """A manifest, profile or certificate breaks its schema."""

    code = "bad_manifest"


class ArtifactError(HawkVisionError):
    """A model file is missing, corrupt or of another build."""

    code = "bad_artifact"


class BackendError(HawkVisionError):
    """A backend cannot load or run a model."""

    code = "bad_backend"


class BackendUnavailable(BackendError):
    """The device of a backend does not respond now. It may again later."""

    code = "unavailable"
    status = 503


class CompileError(HawkVisionError):
    """The FPGA compiler cannot use a model, folding or device, or native code cannot be compiled; says why."""

    code = "compile"


class EscalationFailed(HawkVisionError):
    """The datacenter tier did not answer; the edge answers `degraded` instead."""

    code = "escalation_failed"


def _with_subclasses(kind: type[HawkVisionError]) -> list[type[HawkVisionError]]:
    return [kind, *(below for child in kind.__subclasses__() for below in _with_subclasses(child))]


BY_CODE: Final = {kind.code: kind for kind in _with_subclasses(HawkVisionError)}
"""The classes above by their codes."""
