"""Checkpoints of a paged run are ordinary ones; here is what guards their writing."""

from .disk import checkpoint_bytes, require_space, whole_or_nothing

__all__ = ["checkpoint_bytes", "require_space", "whole_or_nothing"]
