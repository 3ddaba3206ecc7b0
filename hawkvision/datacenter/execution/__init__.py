"""Replicas: batches, ensembles and the second stage."""
