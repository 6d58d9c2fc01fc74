"""Programs -> samples."""
