"""Rollouts as trainers log them: tokens, the engine's log probabilities, and what belongs to them."""

from harness.formats.rollout.history import read_history
from harness.formats.rollout.reader import read_rollouts
from harness.formats.rollout.row import Rollout, Rollouts, Sampling

__all__ = ["Rollout", "Rollouts", "Sampling", "read_history", "read_rollouts"]
