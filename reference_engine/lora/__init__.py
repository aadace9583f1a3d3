"""LoRA adapters: their config as PEFT means it, and what they add to the rows of a batch."""

from __future__ import annotations
