"""Drift: monitors that test whether traffic is as certified, and controllers that follow audits."""
