"""The oracle: HuggingFace transformers as the truth, as the noise reference, and as the judge of single operations."""
