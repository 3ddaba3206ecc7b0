"""The page of a node: try it, watch it, and review what its stages answered differently."""
