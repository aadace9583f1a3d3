"""Weights against weights: which tensors differ, whatever they are called and however they are fused or sharded."""
