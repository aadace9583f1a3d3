"""ONNX Runtime's Sigmoid in float32 is as exact as one, not as its own value: shown without the harness.

    python reports/cpu/onnxruntime_sigmoid.py

needs onnx, onnxruntime and torch. Errors are relative to the value, in units of 2^-24, against float64.
"""

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper

RANGES = ((-8, -4), (-4, -2), (-2, -1), (-1, 0), (0, 2), (2, 8))


def session() -> onnxruntime.InferenceSession:
    """Return a graph that is one node."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [None]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Sigmoid", ["x"], ["y"])], "sigmoid", [x], [y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
    model.ir_version = 10
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def main() -> None:
    """Print the errors in some ranges."""
    run = session()
    for low, high in RANGES:
        x = np.random.default_rng(0).uniform(low, high, 200_000).astype(np.float32)
        exact = 1 / (1 + np.exp(-x.astype(np.float64)))
        theirs, ours = run.run(None, {"x": x})[0], torch.from_numpy(x).sigmoid().numpy()
        errors = [np.abs(y.astype(np.float64) / exact - 1) / 2**-24 for y in (theirs, ours)]
        said = (f"root mean square {np.sqrt((e**2).mean()):.2f}, largest {e.max():.1f}" for e in errors)
        print(f"{low} to {high}: onnxruntime {next(said)}; torch {next(said)}")


if __name__ == "__main__":
    main()
