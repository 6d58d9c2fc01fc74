"""Wrapped candidates -> programs and failures."""
