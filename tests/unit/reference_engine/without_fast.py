"""A pytest plugin, `-p`, and a module to import first: the room `reference_engine.fast` is not there."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

ROOM = "reference_engine.fast"


class Blocker(MetaPathFinder):
    """Refuses to find the room, as if its folder were removed."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == ROOM or name.startswith(f"{ROOM}."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


assert ROOM not in sys.modules, "too late: something has imported it"
sys.meta_path.insert(0, Blocker())
