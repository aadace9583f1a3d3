"""What every explanation works with: the wrong rows, a hypothesis about them, and HF's own operations run again."""
