"""From the tensors of a model to those that its task kind takes, by the name that a manifest gives."""
