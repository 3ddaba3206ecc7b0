"""The zoo's workshop: from pinned weight files to verified ONNX artefacts, without torch."""
