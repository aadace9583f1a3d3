"""Rollouts as trainers log them: tokens, the engine's log probabilities, and what belongs to them."""

from harness.extensions.rollout.format.reader import read_rollouts
from harness.extensions.rollout.format.record import Rollout, Rollouts, Sampling

__all__ = ["Rollout", "Rollouts", "Sampling", "read_rollouts"]
