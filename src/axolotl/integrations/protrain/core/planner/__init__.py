"""Make a plan: trace, hardware, bytes, seconds, search."""
