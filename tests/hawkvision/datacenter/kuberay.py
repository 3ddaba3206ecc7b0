"""Checks of manifests against the schemas of KubeRay and Kubernetes, and against KubeRay's own rules.

`python -m tests.hawkvision.datacenter.kuberay FILE` compares our part of KubeRay's schema with the whole, if you have
the file that `rayservice.schema.yaml` names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

OUR_PART: Final[dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("rayservice.schema.yaml").read_text(encoding="utf-8")
)
KUBERNETES: Final = "1.34"
COMPARED: Final = ("type", "enum", "minimum")


def check(document: dict[str, Any]) -> None:
    """Raise for what the API server or KubeRay would refuse."""
    if document["kind"] != "RayService":
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
        return
    Draft202012Validator(OUR_PART).validate(document)
    cluster = document["spec"]["rayClusterConfig"]
    for group in groups(cluster):
        template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": group["template"]}
        kubernetes_validate.validate(template, KUBERNETES, strict=True)
    _check_like_the_operator(cluster)


def groups(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups of pods, the head's first."""
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def _check_like_the_operator(cluster: dict[str, Any]) -> None:
    """KubeRay's rules that no schema states (`ValidateRayClusterSpec` in its controllers/ray/utils/validation.go)."""
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    variables = {each["name"] for each in head["env"]}
    if cluster.get("authOptions", {}).get("mode") == "token":
        assert tuple(map(int, cluster["rayVersion"].split("."))) >= (2, 52, 0), "a token needs rayVersion >= 2.52.0"
    assert not variables & {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD", "REDIS_USERNAME"}, "only by gcsFaultToleranceOptions"
    for group in groups(cluster):
        assert "labels" not in group["rayStartParams"]
        policy = group["template"]["spec"].get("restartPolicy", "Never")
        assert policy == "Never" or not cluster["enableInTreeAutoscaling"], "autoscaling starts new pods instead"


def differences(ours: Any, theirs: Any, path: str = "") -> Iterator[str]:
    """Where our schema says something else than the whole one; Kubernetes' own types are left out."""
    ours, theirs = _resolved(ours), _resolved(theirs)
    for word in COMPARED:
        if word in ours and ours[word] != theirs.get(word):
            yield f"{path}: {word} = {ours[word]}, there {theirs.get(word)}"
    if "required" in ours and set(ours["required"]) != set(theirs.get("required", ())):
        yield f"{path}: required = {ours['required']}, there {theirs.get('required', [])}"
    if "items" in ours:
        yield from differences(ours["items"], theirs["items"], f"{path}[]")
    if isinstance(each := ours.get("additionalProperties"), dict):
        yield from differences(each, theirs["additionalProperties"], f"{path}.*")
    for name, part in ours.get("properties", {}).items():
        if name in theirs.get("properties", {}):
            yield from differences(part, theirs["properties"][name], f"{path}.{name}")
        else:
            yield f"{path}.{name}: not there"


def _resolved(schema: Any) -> Any:
    return OUR_PART["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def spec_of(definition: dict[str, Any]) -> dict[str, Any]:
    """The schema of `spec` in a CustomResourceDefinition of RayService."""
    (version,) = (each for each in definition["spec"]["versions"] if each["name"] == "v1")
    spec: dict[str, Any] = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return spec


if __name__ == "__main__":
    whole = spec_of(yaml.load(Path(sys.argv[1]).read_text(encoding="utf-8"), Loader=yaml.CSafeLoader))
    found = list(differences(OUR_PART["properties"]["spec"], whole, "spec"))
    print("\n".join(found) or "no difference")
    sys.exit(bool(found))
