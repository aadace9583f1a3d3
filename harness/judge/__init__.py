"""Is it right: rows put back into HuggingFace's forward and judged, and the causes of what is wrong."""
