"""A CUDA device that is not there: `make test-pretended-gpu` runs what needs a GPU on tensors that say `cuda:0`.

Each operation runs on the CPU, after the checks of a real device: one device for all tensors, numbers of the host only
where kernels take them. New memory is NaN. Waits for the device are counted, and refused while a graph is recorded.
What is copied to pinned memory is garbage until something waits for it, and what a graph made until it is replayed.
Triton's kernels are interpreted. It shows nothing of speed, and nothing of what a GPU's own arithmetic does.

    python -m tests.pretended_gpu check --quick --device cuda     # a command of the harness on it
    pytest -p tests.pretended_gpu.plugin -m gpu                   # tests on it
"""
