"""An engine's tensors from a folder: which of them are which taps is found by what they hold, and by their names."""

from harness.engines.tensor_folder.engine import FolderEngine

__all__ = ["FolderEngine"]
