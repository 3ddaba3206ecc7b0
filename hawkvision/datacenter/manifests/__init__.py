"""Deployment files for a cluster: Serve's config for `serve deploy`, and what KubeRay needs on Kubernetes."""
