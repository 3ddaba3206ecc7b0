"""Several tasks on one node, of several kinds."""
