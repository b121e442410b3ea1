"""The guarded road from ONNX to MNN: converter, audit, parity."""
