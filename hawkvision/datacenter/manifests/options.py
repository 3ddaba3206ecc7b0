"""What `hawkvision dc config` takes for Kubernetes, beside the tier's settings."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, get_args

from hawkvision.core.errors import ConfigError

PullPolicy = Literal["Always", "IfNotPresent", "Never"]
# A registry, a path, a tag and a digest, as container engines write them.
_IMAGE: Final = re.compile(r"[a-z0-9][a-zA-Z0-9._/:-]*(@sha256:[0-9a-f]{64})?")
_CLAIM: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
_REDIS: Final = re.compile(r"(rediss?://)?[A-Za-z0-9][A-Za-z0-9.-]*:[0-9]{1,5}")


@dataclass(frozen=True, slots=True)
class KubernetesOptions:
    """The options of a RayService."""

    image: str
    """The container image, by tag or by digest (`NAME@sha256:…`)."""
    pull_policy: PullPolicy = "IfNotPresent"
    """When nodes pull the image."""
    models_claim: str | None = None
    """A PersistentVolumeClaim for the models, shared by all pods; None builds them in each pod."""
    redis_address: str | None = None
    """`HOST:PORT` of a Redis that keeps Ray's state, so that it survives the head; None for none."""


def kubernetes_options(image: str, given: dict[str, str | None]) -> KubernetesOptions:
    """The options from the words of a command line; `given` by name, None for what was not said.

    Raises:
        ConfigError: for a value that Kubernetes or Ray would refuse.
    """
    policy = given.get("image_pull_policy") or "IfNotPresent"
    if policy not in get_args(PullPolicy):
        raise ConfigError(f"--image-pull-policy = {policy!r}: expected one of {', '.join(get_args(PullPolicy))}")
    options = KubernetesOptions(
        image=image,
        pull_policy=policy,  # type: ignore[arg-type]  # checked above
        models_claim=given.get("models_claim"),
        redis_address=given.get("redis_address"),
    )
    _check("--rayservice", options.image, _IMAGE, "an image such as registry.example/hawkvision:1 or NAME@sha256:…")
    _check("--models-claim", options.models_claim, _CLAIM, "the name of a PersistentVolumeClaim")
    _check("--redis-address", options.redis_address, _REDIS, "HOST:PORT or redis://HOST:PORT")
    return options


def _check(option: str, value: str | None, form: re.Pattern[str], expected: str) -> None:
    if value is not None and form.fullmatch(value) is None:
        raise ConfigError(f"{option} = {value!r}: expected {expected}")
