"""SGLang on a CPU without its kernels: its own torch code in their place. Import this before SGLang."""

import os
import sys
from types import ModuleType
from unittest.mock import MagicMock

from transformers.utils import is_torchvision_available

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"


class Kernels(ModuleType):
    """`sgl_kernel`, which is built from source for CPUs with AMX: its functions can be imported and not called."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*_args, **_named):
            raise NotImplementedError(f"sgl_kernel.{name} has no stand-in")

        return call


if "sgl_kernel" not in sys.modules:
    sys.modules["sgl_kernel"] = Kernels("sgl_kernel")
if not is_torchvision_available():  # SGLang imports it for images; without a GPU, PyPI's build cannot be imported
    for part in ("", ".io", ".ops", ".transforms", ".transforms.functional", ".transforms.v2"):
        sys.modules[f"torchvision{part}"] = MagicMock()
