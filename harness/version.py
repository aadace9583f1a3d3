"""Version of the harness: part of recordings, profiles and cached goldens. The build reads pyproject.toml's."""

__version__ = "0.1.0"
