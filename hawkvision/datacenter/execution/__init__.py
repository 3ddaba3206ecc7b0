"""ReplicaRegistry: models, batches and the evaluation of one image."""
