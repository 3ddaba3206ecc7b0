"""Deployment files for a cluster: Serve's config for `serve deploy`, and a KubeRay `RayService`.

Both name `hawkvision.datacenter.app:build`, which Serve imports on the cluster, so the image must hold
`hawkvision[datacenter]` and, under `cache_dir`, the model files. Neither file holds a secret: the builder reads
`HAWKVISION_DC_API_KEY`, and Ray its token, from the environment of their node, which KubeRay fills from the Secret
named below. A `NetworkPolicy` opens the HTTP port to callers and the dashboard's to KubeRay's operator, and nothing
else.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import yaml

from hawkvision.core.errors import ConfigError
from hawkvision.core.settings.access import is_loopback
from hawkvision.core.settings.config import DatacenterConfig
from hawkvision.datacenter.deployment.ray_settings import TUNING
from hawkvision.datacenter.execution.threads import replica_cpus
from hawkvision.datacenter.stages.catalog import Catalog, load_catalog

SECRET = "hawkvision-dc"  # noqa: S105  the name of a Secret, not its content
_BUILDER = "hawkvision.datacenter.app:build"
# Settings of the machine that builds, and `address` and `port`, which `serve deploy` and Serve set themselves.
_NOT_ARGS = {"api_key", "address", "port", "ray_network"}
_NAME = "hawkvision-dc"
_LABELS = {"app.kubernetes.io/name": _NAME}
_SERVE_PORT = 8000
_DASHBOARD_PORT = 8265
_HEAD_PORTS = {"gcs": 6379, "dashboard": _DASHBOARD_PORT, "serve": _SERVE_PORT}
_OPERATOR = {"app.kubernetes.io/name": "kuberay-operator"}
"""The labels of the operator's pods, as its Helm chart sets them."""


def serve_config(config: DatacenterConfig) -> str:
    """The YAML for `serve deploy FILE`.

    Raises:
        ConfigError: if the stages are unknown, or if TLS is asked for, which Serve's proxies do not speak.
    """
    return _yaml(_serve_document(config))


def rayservice(config: DatacenterConfig, image: str) -> str:
    """The YAML of a KubeRay `RayService` (`ray.io/v1`) whose pods run `image`, and of its `NetworkPolicy`.

    KubeRay scales the workers to what `min_replicas` to `max_replicas` of each group need. Its Service
    `hawkvision-dc-serve-svc` listens on port 8000.

    Raises:
        ConfigError: as `serve_config`, or if `host` is loopback, which no other pod could reach.
    """
    if is_loopback(config.host):
        raise ConfigError(f"dc.host = {config.host!r}: pods reach one another over the network; set 0.0.0.0")
    per_worker = _resources(config, load_catalog(config))
    serve = _serve_document(msgspec.structs.replace(config, port=_SERVE_PORT))
    worker_group = {
        "groupName": "replicas",
        "replicas": max(config.min_replicas, 1),
        "minReplicas": config.min_replicas,
        "maxReplicas": config.max_replicas,
        "rayStartParams": {},
        "template": _pod("ray-worker", image, per_worker, ports={}),
    }
    head = {
        # KubeRay's shell fills in the address, which only the operator and the probe below use.
        "rayStartParams": {"dashboard-host": "$POD_IP", "num-cpus": "0"},
        "template": _pod("ray-head", image, {"cpu": "2", "memory": "4Gi"}, _HEAD_PORTS, probed=_DASHBOARD_PORT),
    }
    service = {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": {"name": _NAME},
        "spec": {
            "serveConfigV2": _yaml(serve),
            "rayClusterConfig": {
                "authOptions": {"mode": "token", "secretName": SECRET},
                "enableInTreeAutoscaling": config.min_replicas != config.max_replicas,
                "headGroupSpec": head,
                "workerGroupSpecs": [worker_group],
            },
        },
    }
    return f"{_SECRET_HINT}{_yaml(service)}---\n{_yaml(_network_policy())}"


_SECRET_HINT = f"""\
# Needs KubeRay 1.6 or later, and once, before this:
#   kubectl create secret generic {SECRET} --from-literal=api-key="$(openssl rand -hex 32)" \\
#     --from-literal=auth_token="$(openssl rand -hex 32)"
"""


def _network_policy() -> dict[str, Any]:
    """Who may connect to the pods. Ray's ports also ask for its token, the HTTP port for the API key."""

    def tcp(port: int) -> list[dict[str, Any]]:
        return [{"protocol": "TCP", "port": port}]

    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": _NAME},
        "spec": {
            "podSelector": {"matchLabels": _LABELS},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": _LABELS}}]},
                {
                    "from": [{"namespaceSelector": {}, "podSelector": {"matchLabels": _OPERATOR}}],
                    "ports": tcp(_DASHBOARD_PORT),
                },
                {"ports": tcp(_SERVE_PORT)},
            ],
        },
    }


def _serve_document(config: DatacenterConfig) -> dict[str, Any]:
    load_catalog(config)  # fails here if a stage is unknown, not only in the cluster
    if config.tls_certificate is not None:
        raise ConfigError(
            "dc.tls_certificate belongs to a tier on one machine: in a cluster Ray Serve's proxies listen, and "
            "a load balancer in front of them terminates TLS; set dc.allow_plain_http = true"
        )
    defaults = msgspec.to_builtins(DatacenterConfig(), enc_hook=str)
    chosen = msgspec.to_builtins(config, enc_hook=str)
    args = {k: v for k, v in chosen.items() if v != defaults[k] and k not in _NOT_ARGS}
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": config.host, "port": config.port},
        "applications": [
            {
                "name": "hawkvision",
                "route_prefix": "/",
                "import_path": _BUILDER,
                "args": args,
            }
        ],
    }


def _resources(config: DatacenterConfig, catalog: Catalog) -> dict[str, str]:
    """The resources of a worker pod: those of one replica of each group."""
    cpus = math.ceil(sum(replica_cpus(group, config) for group in catalog.groups))
    resources = {"cpu": str(cpus), "memory": "4Gi"}
    if config.num_gpus > 0:
        resources["nvidia.com/gpu"] = str(math.ceil(len(catalog.groups) * config.num_gpus))
    return resources


def _pod(
    name: str, image: str, resources: dict[str, str], ports: dict[str, int], probed: int | None = None
) -> dict[str, Any]:
    """A pod's template; `probed` is the dashboard's port, which replaces KubeRay's probe of the loopback address."""
    # In a pod, unlike on a shared machine, HAProxy should listen on every interface.
    tuning = {**TUNING, "RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_AUTH_MODE": "token"}
    environment: list[dict[str, Any]] = [{"name": k, "value": v} for k, v in tuning.items()]
    for variable, key in (("HAWKVISION_DC_API_KEY", "api-key"), ("RAY_AUTH_TOKEN", "auth_token")):
        environment.append({"name": variable, "valueFrom": {"secretKeyRef": {"name": SECRET, "key": key}}})
    environment.append({"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    container: dict[str, Any] = {
        "name": name,
        "image": image,
        "env": environment,
        "resources": {"requests": resources, "limits": resources},
    }
    if ports:
        container["ports"] = [{"containerPort": port, "name": label} for label, port in ports.items()]
    if probed is not None:
        probe = {"httpGet": {"path": "/api/gcs_healthz", "port": probed}, "periodSeconds": 5, "timeoutSeconds": 5}
        container["readinessProbe"] = {**probe, "initialDelaySeconds": 10, "failureThreshold": 10}
        container["livenessProbe"] = {**probe, "initialDelaySeconds": 30, "failureThreshold": 120}
    return {"metadata": {"labels": _LABELS}, "spec": {"containers": [container]}}


def _yaml(document: dict[str, Any]) -> str:
    text: str = yaml.dump(document, Dumper=_Plain, sort_keys=False)
    return text


class _Plain(yaml.SafeDumper):
    """Writes repeated values without anchors, for human readers."""

    def ignore_aliases(self, data: Any) -> bool:
        """Always."""
        del data
        return True
