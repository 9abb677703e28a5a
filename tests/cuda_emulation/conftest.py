"""These tests need the emulated runtime: `make test-cuda`."""

import torch

collect_ignore_glob = [] if hasattr(torch.ops.fakecuda, "install") or torch.cuda.is_available() else ["test_*.py"]
