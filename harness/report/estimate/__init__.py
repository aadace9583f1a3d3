"""Estimates in every form."""
