"""Parallel parts: layers, losses and gradients over the ranks of a group."""

from megablocks_core.parallel.data_parallel.data_parallel import DataParallel as DataParallel
from megablocks_core.parallel.fsdp.fully_shard import fully_shard as fully_shard
from megablocks_core.parallel.fsdp.fully_shard import no_sync as no_sync
from megablocks_core.parallel.fsdp.precision import PrecisionPolicy as PrecisionPolicy
from megablocks_core.parallel.gradients.clip import clip_grad_norm_ as clip_grad_norm_
from megablocks_core.parallel.gradients.counts import all_finite as all_finite
from megablocks_core.parallel.gradients.counts import count_zeros as count_zeros
from megablocks_core.parallel.gradients.loss_scaler import LossScaler as LossScaler
from megablocks_core.parallel.gradients.reduction import reduce_gradients as reduce_gradients
from megablocks_core.parallel.initial import reset_parameters as reset_parameters
from megablocks_core.parallel.lora.files import load_lora as load_lora
from megablocks_core.parallel.lora.files import save_lora as save_lora
from megablocks_core.parallel.lora.lora import add_lora as add_lora
from megablocks_core.parallel.lora.lora import remove_lora as remove_lora
from megablocks_core.parallel.lora.merge import merge_lora as merge_lora
from megablocks_core.parallel.lora.merge import unmerge_lora as unmerge_lora
from megablocks_core.parallel.losses.cross_entropy import (
    vocab_parallel_cross_entropy as vocab_parallel_cross_entropy,
)
from megablocks_core.parallel.losses.divergence import StoredTopK as StoredTopK
from megablocks_core.parallel.losses.divergence import vocab_parallel_kl as vocab_parallel_kl
from megablocks_core.parallel.losses.linear_cross_entropy import (
    linear_cross_entropy as linear_cross_entropy,
)
from megablocks_core.parallel.losses.linear_divergence import TeacherHead as TeacherHead
from megablocks_core.parallel.losses.linear_divergence import linear_kl as linear_kl
from megablocks_core.parallel.memory.host_buffers import HostBuffers as HostBuffers
from megablocks_core.parallel.memory.offload import Offloaded as Offloaded
from megablocks_core.parallel.memory.offload import offload as offload
from megablocks_core.parallel.memory.recompute import recompute as recompute
from megablocks_core.parallel.memory.recompute_modules import RecomputePolicy as RecomputePolicy
from megablocks_core.parallel.memory.recompute_modules import recompute_modules as recompute_modules
from megablocks_core.parallel.memory.replay import remember as remember
from megablocks_core.parallel.models.tensor_parallelize import gather as gather
from megablocks_core.parallel.models.tensor_parallelize import (
    tensor_parallelize as tensor_parallelize,
)
from megablocks_core.parallel.moving_average import MovingAverage as MovingAverage
from megablocks_core.parallel.muon.muon import Muon as Muon
from megablocks_core.parallel.muon.newton_schulz import NewtonSchulz as NewtonSchulz
from megablocks_core.parallel.random.dropout import Dropout as Dropout
from megablocks_core.parallel.random.dropout import DropoutKey as DropoutKey
from megablocks_core.parallel.random.dropout import dropout as dropout
from megablocks_core.parallel.random.dropout_modules import dropout_modules as dropout_modules
from megablocks_core.parallel.sequence import SequenceCut as SequenceCut
from megablocks_core.parallel.sharded_optimizer.pieces import (
    StochasticRounding as StochasticRounding,
)
from megablocks_core.parallel.sharded_optimizer.sharded_optimizer import (
    ShardedOptimizer as ShardedOptimizer,
)
from megablocks_core.parallel.tensor.embedding import (
    VocabParallelEmbedding as VocabParallelEmbedding,
)
from megablocks_core.parallel.tensor.linear import ColumnParallelLinear as ColumnParallelLinear
from megablocks_core.parallel.tensor.linear import RowParallelLinear as RowParallelLinear
from megablocks_core.parallel.tensor.linear import column_linears as column_linears
from megablocks_core.parallel.tensor.linear import gather_features as gather_features
from megablocks_core.parallel.tensor.plan import Column as Column
from megablocks_core.parallel.tensor.plan import Row as Row
from megablocks_core.parallel.tensor.resizing import resize_vocab as resize_vocab
