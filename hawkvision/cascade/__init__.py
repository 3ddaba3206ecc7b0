"""Confidence scaling: scores, calibration, certificates, profiles and the policy that decides who answers."""
