"""Ways to get an RMS norm or a layer norm wrong."""
