"""The user's own models: brought from ONNX files, checked against their owner's predictions, quantised."""
