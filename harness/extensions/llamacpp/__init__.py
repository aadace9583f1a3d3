"""llama.cpp as an engine under test, and GGUF files as checkpoints."""
