"""Attention, exact and computed block by block."""

from __future__ import annotations

from .api import flash_attention
from .merge import merge_attention
from .reference import reference_attention
from .space import flash_attention_space

__all__ = ["flash_attention", "flash_attention_space", "merge_attention", "reference_attention"]
