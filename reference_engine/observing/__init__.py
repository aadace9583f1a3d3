"""Who watches the engine from outside: the observer of intermediates, and the checks of its cache."""

from __future__ import annotations
