"""Kernels worth tuning: each is a plain function with hyperparameters, and a space of values to try."""

from __future__ import annotations

from .attention import flash_attention, flash_attention_space, merge_attention, reference_attention

__all__ = ["flash_attention", "flash_attention_space", "merge_attention", "reference_attention"]
