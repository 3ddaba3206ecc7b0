"""One request on its way: admission, the target, the decision and the response."""
