"""Every decoder of transformers as a tiny checkpoint, without a network."""
