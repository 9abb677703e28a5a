"""What `benchmarks/compare.py` is made of.

cases -> models -> setup -> systems -> measure (one process a system) -> report.
"""
