"""What a HuggingFace checkpoint says and holds: its config, the table of families, the names of its tensors."""

from __future__ import annotations
