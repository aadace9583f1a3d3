"""What a loader of quantised checkpoints gets wrong, by the kind of operation in which it shows."""

from harness.extensions.quantised.misread import inputs_otherwise, misread_weight, quantised_though_left_out
from harness.extensions.quantised.misread_experts import misread_experts
from harness.formats.taps import Kind

EXPLANATIONS = {
    Kind.LINEAR: (misread_weight, inputs_otherwise, quantised_though_left_out),
    Kind.OTHER: (misread_experts,),
}
