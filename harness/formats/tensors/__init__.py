"""Tensors that people have dumped: a folder of `.npy`, `.safetensors` and `.pt` files. Nothing is unpickled."""

from harness.formats.tensors.folder import NamedTensor, TensorFiles, read_tensors

__all__ = ["NamedTensor", "TensorFiles", "read_tensors"]
