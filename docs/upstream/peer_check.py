"""Axolotl: several ranks on a machine without a GPU, with a CUDA build of torch.

`check_cuda_p2p_support` expects an AssertionError from `can_device_access_peer`, which is
a CPU build's. A CUDA build without a driver raises a RuntimeError, and every rank ends.
`if not torch.cuda.is_available(): return True` before the call would do.
"""

import os

import torch

os.environ |= {"WORLD_SIZE": "2", "LOCAL_RANK": "0"}
print("torch", torch.__version__, "is a CUDA build:", torch.version.cuda is not None)
try:
    torch.cuda.can_device_access_peer(0, 1)
except AssertionError as error:
    print(f"AssertionError, which Axolotl expects: {error}")
except RuntimeError as error:
    print(f"RuntimeError, which it does not: {error}")
    print("reproduced")
