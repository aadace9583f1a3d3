"""Types of the tensors in a GGUF file: their numbers, and how many bytes a block of elements takes.

The numbers are those of `ggml_type` in ggml.h, the sizes those of the block structures in ggml-common.h.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GGMLType:
    """One type of ggml."""

    name: str
    block_size: int
    """Elements that are stored together; a row is a whole number of blocks."""
    block_bytes: int

    @property
    def bits_per_weight(self) -> float:
        """Bits of one element, its share of the block's scales included."""
        return 8 * self.block_bytes / self.block_size


TYPES: dict[int, GGMLType] = {
    0: GGMLType("F32", 1, 4),
    1: GGMLType("F16", 1, 2),
    2: GGMLType("Q4_0", 32, 18),
    3: GGMLType("Q4_1", 32, 20),
    6: GGMLType("Q5_0", 32, 22),
    7: GGMLType("Q5_1", 32, 24),
    8: GGMLType("Q8_0", 32, 34),
    9: GGMLType("Q8_1", 32, 36),
    10: GGMLType("Q2_K", 256, 84),
    11: GGMLType("Q3_K", 256, 110),
    12: GGMLType("Q4_K", 256, 144),
    13: GGMLType("Q5_K", 256, 176),
    14: GGMLType("Q6_K", 256, 210),
    15: GGMLType("Q8_K", 256, 292),
    16: GGMLType("IQ2_XXS", 256, 66),
    17: GGMLType("IQ2_XS", 256, 74),
    18: GGMLType("IQ3_XXS", 256, 98),
    19: GGMLType("IQ1_S", 256, 50),
    20: GGMLType("IQ4_NL", 32, 18),
    21: GGMLType("IQ3_S", 256, 110),
    22: GGMLType("IQ2_S", 256, 82),
    23: GGMLType("IQ4_XS", 256, 136),
    24: GGMLType("I8", 1, 1),
    25: GGMLType("I16", 1, 2),
    26: GGMLType("I32", 1, 4),
    27: GGMLType("I64", 1, 8),
    28: GGMLType("F64", 1, 8),
    29: GGMLType("IQ1_M", 256, 56),
    30: GGMLType("BF16", 1, 2),
    34: GGMLType("TQ1_0", 256, 54),
    35: GGMLType("TQ2_0", 256, 66),
    39: GGMLType("MXFP4", 32, 17),
}
"""By the number that stands in the file."""

BY_NAME = {item.name: (number, item) for number, item in TYPES.items()}
"""Number and type by name."""

PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Types that hold each element by itself, with torch's names of them."""
