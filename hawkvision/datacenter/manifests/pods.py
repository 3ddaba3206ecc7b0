"""The pods of a RayService: they start from the image alone, as a user without rights, with a root that is read-only.

KubeRay adds to them what Ray needs: the `ray start` command, a container that waits for the head, the memory that Ray
shares (`/dev/shm`), and with autoscaling a container beside the head's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.deployment.ray_settings import TUNING
from hawkvision.datacenter.manifests.options import KubernetesOptions
from hawkvision.datacenter.manifests.sizing import Workers
from hawkvision.datacenter.stages.catalog import Catalog

SERVE_PORT: Final = 8000
DASHBOARD_PORT: Final = 8265
GCS_PORT: Final = 6379
_AGENT_PORT: Final = 52365
"""Ray's agent on each node. Its health is public; all else there asks for Ray's token."""
MODELS_FOLDER: Final = "/var/lib/hawkvision"
"""The image's own `cache_dir`."""
_USER: Final = 10001
"""The image's own user and group."""
_DRAIN_S: Final = 60
"""Seconds in which a pod that is to stop hands its replicas over."""
_GRACE_S: Final = 90
"""Seconds until Kubernetes kills such a pod: the drain, and 30 s for Ray to stop."""
LOCKED: Final[dict[str, Any]] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
TMP: Final[dict[str, Any]] = {"name": "tmp", "mountPath": "/tmp"}  # noqa: S108  a volume of the pod's own
_HEAD_RESOURCES: Final = {"cpu": "2", "memory": "4Gi"}


def labels_of(name: str) -> dict[str, str]:
    """The labels of all objects of a RayService."""
    return {"app.kubernetes.io/name": name}


def head_pod(name: str, config: DatacenterConfig, options: KubernetesOptions, *, scales: bool) -> dict[str, Any]:
    """The head's template: Ray's control processes and Serve's controller, no replica.

    Args:
        name: the RayService's.
        scales: whether the head may ask Kubernetes for pods.
    """
    container = _container("ray-head", name, config, options, _HEAD_RESOURCES)
    container["ports"] = _ports(gcs=GCS_PORT, dashboard=DASHBOARD_PORT, serve=SERVE_PORT)
    # The dashboard's process serves the operator; without it no update arrives.
    container["readinessProbe"] = _probe("/api/gcs_healthz", DASHBOARD_PORT, delay_s=10, failures=10)
    container["livenessProbe"] = _probe("/api/healthz", _AGENT_PORT, delay_s=30, failures=120)
    pod = _pod(container, name, config)
    # By the account that KubeRay makes for it.
    pod["spec"]["automountServiceAccountToken"] = scales
    return pod


def worker_pod(
    name: str, config: DatacenterConfig, options: KubernetesOptions, catalogs: tuple[Catalog, ...], workers: Workers
) -> dict[str, Any]:
    """A worker's template: replicas, and Serve's HTTP proxy."""
    resources = {"cpu": str(workers.cpus), "memory": f"{workers.memory_gib}Gi"}
    if workers.gpus:
        resources["nvidia.com/gpu"] = str(workers.gpus)
    container = _container("ray-worker", name, config, options, resources)
    container["ports"] = _ports(serve=SERVE_PORT)
    # A pod without a replica has no proxy, so it is in no Service. KubeRay's own probe would need wget in the image.
    container["readinessProbe"] = _probe("/-/healthz", SERVE_PORT, delay_s=5, failures=1)
    container["livenessProbe"] = _probe("/api/healthz", _AGENT_PORT, delay_s=30, failures=120)
    container["lifecycle"] = {
        "preStop": {"exec": {"command": ["hawkvision", "dc", "drain", "--limit-s", str(_DRAIN_S)]}}
    }
    pod = _pod(container, name, config)
    spec = pod["spec"]
    spec["automountServiceAccountToken"] = False
    spec["terminationGracePeriodSeconds"] = _GRACE_S
    if config.backend != "noop":
        folder = str(config.cache_dir or MODELS_FOLDER)
        claim = options.models_claim
        volume = {"emptyDir": {}} if claim is None else {"persistentVolumeClaim": {"claimName": claim}}
        spec["volumes"].append({"name": "models", **volume})
        container["volumeMounts"].append({"name": "models", "mountPath": folder, "readOnly": True})
        spec["initContainers"] = [
            _models_container(number, catalog, config, options, folder) for number, catalog in enumerate(catalogs)
        ]
    return pod


def _models_container(
    number: int, catalog: Catalog, config: DatacenterConfig, options: KubernetesOptions, folder: str
) -> dict[str, Any]:
    """Builds the models of a task. It keeps files that are right, and then it needs no network."""
    command = ["hawkvision", "models", "build", *(variant.name for variant in catalog.variants)]
    command += ["--task", catalog.task, "--cache-dir", folder]
    if config.models_dir is not None:
        command += ["--models-dir", str(config.models_dir)]
    return {
        "name": f"models-{number}",
        "image": options.image,
        "imagePullPolicy": options.pull_policy,
        "command": command,
        "resources": {"requests": {"cpu": "1", "memory": "2Gi"}, "limits": {"memory": "2Gi"}},
        "securityContext": LOCKED,
        "volumeMounts": [TMP, {"name": "models", "mountPath": folder}],
    }


def _container(
    title: str, name: str, config: DatacenterConfig, options: KubernetesOptions, resources: dict[str, str]
) -> dict[str, Any]:
    # In a pod, unlike on a shared machine, HAProxy should listen on every interface.
    tuning = {**TUNING, "RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_AUTH_MODE": "token"}
    environment: list[dict[str, Any]] = [{"name": k, "value": v} for k, v in tuning.items()]
    environment.append(_from_secret(name, "RAY_AUTH_TOKEN", "auth_token"))
    if config.keys_file is None:
        environment.append(_from_secret(name, "HAWKVISION_DC_API_KEY", "api-key"))
    environment.append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    mounts = [TMP]
    if config.keys_file is not None:
        mounts = [TMP, {"name": "keys", "mountPath": str(Path(config.keys_file).parent), "readOnly": True}]
    return {
        "name": title,
        "image": options.image,
        "imagePullPolicy": options.pull_policy,
        "env": environment,
        "resources": {"requests": resources, "limits": resources},
        "securityContext": LOCKED,
        "volumeMounts": mounts,
    }


def _pod(container: dict[str, Any], name: str, config: DatacenterConfig) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [{"name": "tmp", "emptyDir": {"sizeLimit": "4Gi"}}]
    if config.keys_file is not None:
        items = [{"key": "keys", "path": Path(config.keys_file).name}]
        volumes.append({"name": "keys", "secret": {"secretName": name, "items": items, "defaultMode": 0o440}})
    spec = {
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "runAsGroup": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
    return {"metadata": {"labels": labels_of(name)}, "spec": spec}


def _from_secret(secret: str, variable: str, key: str) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _ports(**ports: int) -> list[dict[str, Any]]:
    return [{"containerPort": port, "name": name} for name, port in ports.items()]


def _probe(path: str, port: int, delay_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "initialDelaySeconds": delay_s,
        "periodSeconds": 5,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
