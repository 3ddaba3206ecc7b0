"""Graph models of TensorFlow.js as ONNX: a parser, a converter and the detectors that are built with them."""
