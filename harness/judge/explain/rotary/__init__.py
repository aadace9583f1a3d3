"""Ways to get rotary embeddings wrong: frequencies, pairs, positions."""

from harness.judge.explain.rotary import frequencies, rotation

ROTATED_WRONGLY = (
    rotation.other_pairs,
    rotation.not_rotated,
    rotation.backwards,
    frequencies.scaling_ignored,
    frequencies.other_scaling,
    frequencies.wrong_theta,
    frequencies.of_other_layers,
    rotation.stretched,
    frequencies.partial_rotary,
    rotation.coarse_table,
    rotation.frequencies_of_other_pairs,
)
"""What may be wrong with a rotation but its positions, the likelier first."""
