"""Hides the packages that HIDDEN_PACKAGES names from this process, as if they were not installed."""

import os
from importlib.machinery import PathFinder
from types import MethodType

HIDDEN = set(os.environ.get("HIDDEN_PACKAGES", "").split(","))
_find_spec = PathFinder.find_spec


def _find_others(_, name, path=None, target=None):
    return None if name.partition(".")[0] in HIDDEN else _find_spec(name, path, target)


PathFinder.find_spec = MethodType(_find_others, PathFinder)  # bound, as its own: pytest keeps it in a class of its own
