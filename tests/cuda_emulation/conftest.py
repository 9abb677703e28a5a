"""These tests need the emulated runtime: `make test-cuda`. On a real card `test_paging.py`
runs too, but for what takes waits away: `-k "equal or smaller"`."""

import torch

emulated = hasattr(torch.ops.fakecuda, "install")
collect_ignore_glob = [] if emulated or torch.cuda.is_available() else ["test_*.py"]
