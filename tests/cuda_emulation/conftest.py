"""These tests need the emulated runtime: `make test-cuda`."""

import torch

collect_ignore_glob = [] if hasattr(torch.ops.fakecuda, "install") else ["test_*.py"]
