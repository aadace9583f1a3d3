"""HuggingFace's own quantised forms that run on a CPU: torchao's and compressed-tensors'."""
