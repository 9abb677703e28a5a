"""Checkpoints are whole or not there, and what a run resumes from is looked at first."""

from ..manifest import (
    MANIFEST as MANIFEST,
    OPTIMIZER as OPTIMIZER,
    SCHEDULER as SCHEDULER,
    checkpoints,
    differences,
)
from .faults import (
    fault_of,
    has_state,
    load_states,
    require_whole,
)
from .files import save_without_bytes, write_file
from .folders import (
    SLACK_BYTES as SLACK_BYTES,
    STAGING as STAGING,
    TOKEN_BYTES as TOKEN_BYTES,
    checkpoint_bytes,
    discard,
    locked,
    publish,
    require_space,
    restore,
    restored_on_failure,
    staged,
)
from .plans import FilePlan, Piece, TensorSpec, plan_safetensors, spec_of
from .snapshots import Snapshot
