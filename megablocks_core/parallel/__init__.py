"""Parallel parts: layers, losses and gradients over the ranks of a group."""

from megablocks_core.parallel.clip import clip_grad_norm_ as clip_grad_norm_
from megablocks_core.parallel.cross_entropy import (
    vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
)
from megablocks_core.parallel.data_parallel import DataParallel as DataParallel
from megablocks_core.parallel.divergence import StoredTopK as StoredTopK
from megablocks_core.parallel.divergence import vocab_parallel_kl as vocab_parallel_kl
from megablocks_core.parallel.dropout import Dropout as Dropout
from megablocks_core.parallel.dropout import DropoutKey as DropoutKey
from megablocks_core.parallel.dropout import dropout as dropout
from megablocks_core.parallel.dropout_modules import dropout_modules as dropout_modules
from megablocks_core.parallel.embedding import VocabParallelEmbedding as VocabParallelEmbedding
from megablocks_core.parallel.fsdp_precision import PrecisionPolicy as PrecisionPolicy
from megablocks_core.parallel.fully_shard import fully_shard as fully_shard
from megablocks_core.parallel.fully_shard import no_sync as no_sync
from megablocks_core.parallel.gradient_counts import all_finite as all_finite
from megablocks_core.parallel.gradient_counts import count_zeros as count_zeros
from megablocks_core.parallel.gradients import reduce_gradients as reduce_gradients
from megablocks_core.parallel.host_buffers import HostBuffers as HostBuffers
from megablocks_core.parallel.initial import reset_parameters as reset_parameters
from megablocks_core.parallel.linear import ColumnParallelLinear as ColumnParallelLinear
from megablocks_core.parallel.linear import RowParallelLinear as RowParallelLinear
from megablocks_core.parallel.linear import column_linears as column_linears
from megablocks_core.parallel.linear import gather_features as gather_features
from megablocks_core.parallel.linear_cross_entropy import (
    linear_cross_entropy as linear_cross_entropy,
)
from megablocks_core.parallel.linear_divergence import TeacherHead as TeacherHead
from megablocks_core.parallel.linear_divergence import linear_kl as linear_kl
from megablocks_core.parallel.lora import add_lora as add_lora
from megablocks_core.parallel.lora import remove_lora as remove_lora
from megablocks_core.parallel.lora_files import load_lora as load_lora
from megablocks_core.parallel.lora_files import save_lora as save_lora
from megablocks_core.parallel.lora_merge import merge_lora as merge_lora
from megablocks_core.parallel.lora_merge import unmerge_lora as unmerge_lora
from megablocks_core.parallel.loss_scaler import LossScaler as LossScaler
from megablocks_core.parallel.moving_average import MovingAverage as MovingAverage
from megablocks_core.parallel.muon import Muon as Muon
from megablocks_core.parallel.newton_schulz import NewtonSchulz as NewtonSchulz
from megablocks_core.parallel.offload import Offloaded as Offloaded
from megablocks_core.parallel.offload import offload as offload
from megablocks_core.parallel.optimizer_pieces import StochasticRounding as StochasticRounding
from megablocks_core.parallel.plan import Column as Column
from megablocks_core.parallel.plan import Row as Row
from megablocks_core.parallel.recompute import recompute as recompute
from megablocks_core.parallel.recompute_modules import RecomputePolicy as RecomputePolicy
from megablocks_core.parallel.recompute_modules import recompute_modules as recompute_modules
from megablocks_core.parallel.replay import remember as remember
from megablocks_core.parallel.sharded_optimizer import ShardedOptimizer as ShardedOptimizer
from megablocks_core.parallel.tensor_parallelize import gather as gather
from megablocks_core.parallel.tensor_parallelize import tensor_parallelize as tensor_parallelize
