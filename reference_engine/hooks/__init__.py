"""What watches the engine: how its steps are told to an observer, and the checks of its cache."""

from __future__ import annotations
