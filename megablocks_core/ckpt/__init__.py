"""Checkpoints: whole tensors in safetensors and one JSON manifest; any layout resumes at any.

``state`` maps names to modules, torch optimizers, tensors and JSON values. A checkpoint is a
folder that appears whole or not at all; ``LATEST`` beside it names the newest.
"""

from megablocks_core.ckpt.format.verifying import verify as verify
from megablocks_core.ckpt.loading.loading import LoadReport as LoadReport
from megablocks_core.ckpt.loading.loading import load as load
from megablocks_core.ckpt.loading.newest import latest as latest
from megablocks_core.ckpt.loading.newest import load_latest as load_latest
from megablocks_core.ckpt.local_tier.tier import LocalTier as LocalTier
from megablocks_core.ckpt.manifest import CheckpointError as CheckpointError
from megablocks_core.ckpt.saving.async_saver import AsyncSaver as AsyncSaver
from megablocks_core.ckpt.saving.retention import prune as prune
from megablocks_core.ckpt.saving.saving import save as save
from megablocks_core.ckpt.state.logical import LogicalField as LogicalField
from megablocks_core.ckpt.state.logical import LogicalGroup as LogicalGroup
from megablocks_core.ckpt.state.logical import LogicalOptimizer as LogicalOptimizer
from megablocks_core.ckpt.state.logical import LogicalState as LogicalState
from megablocks_core.ckpt.state.logical import TorchLikeOptimizer as TorchLikeOptimizer
