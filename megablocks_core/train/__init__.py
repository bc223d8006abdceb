"""Parts of a training loop that you write: metrics, timing, evaluation, and the report."""

from megablocks_core.train.determinism import assert_deterministic as assert_deterministic
from megablocks_core.train.evaluate import evaluate as evaluate
from megablocks_core.train.evaluate import next_token_loss as next_token_loss
from megablocks_core.train.expert_load import expert_load as expert_load
from megablocks_core.train.flops import AttentionWork as AttentionWork
from megablocks_core.train.flops import ExpertsWork as ExpertsWork
from megablocks_core.train.flops import FeedForwardWork as FeedForwardWork
from megablocks_core.train.flops import LinearWork as LinearWork
from megablocks_core.train.flops import Work as Work
from megablocks_core.train.flops import decoder_work as decoder_work
from megablocks_core.train.flops import mfu as mfu
from megablocks_core.train.flops import training_flops as training_flops
from megablocks_core.train.folder import RunFolder as RunFolder
from megablocks_core.train.folder import add_to_summary as add_to_summary
from megablocks_core.train.folder import read_run as read_run
from megablocks_core.train.garbage import collect_every as collect_every
from megablocks_core.train.guard import FiniteGuard as FiniteGuard
from megablocks_core.train.guard import SpikeGuard as SpikeGuard
from megablocks_core.train.lines import JsonLines as JsonLines
from megablocks_core.train.lines import read_lines as read_lines
from megablocks_core.train.machine import matmul_peak as matmul_peak
from megablocks_core.train.metrics import Mean as Mean
from megablocks_core.train.metrics import Metrics as Metrics
from megablocks_core.train.metrics import pooled as pooled
from megablocks_core.train.parameter_groups import ParameterGroups as ParameterGroups
from megablocks_core.train.parameter_groups import Rule as Rule
from megablocks_core.train.parameter_groups import decays as decays
from megablocks_core.train.parameter_groups import parameter_groups as parameter_groups
from megablocks_core.train.progress import Progress as Progress
from megablocks_core.train.record import run_record as run_record
from megablocks_core.train.schedule import Constant as Constant
from megablocks_core.train.schedule import InverseSquareRoot as InverseSquareRoot
from megablocks_core.train.schedule import Product as Product
from megablocks_core.train.schedule import Ramp as Ramp
from megablocks_core.train.schedule import Stages as Stages
from megablocks_core.train.schedule import constant_schedule as constant_schedule
from megablocks_core.train.schedule import cosine_schedule as cosine_schedule
from megablocks_core.train.schedule import (
    inverse_square_root_schedule as inverse_square_root_schedule,
)
from megablocks_core.train.schedule import linear_schedule as linear_schedule
from megablocks_core.train.schedule import (
    warmup_stable_decay_schedule as warmup_stable_decay_schedule,
)
from megablocks_core.train.scheduled import Scheduled as Scheduled
from megablocks_core.train.sinks import Sink as Sink
from megablocks_core.train.sinks import Sinks as Sinks
from megablocks_core.train.sinks import TensorBoard as TensorBoard
from megablocks_core.train.sinks import WandB as WandB
from megablocks_core.train.stop import StopAfter as StopAfter
from megablocks_core.train.timing import StepTimer as StepTimer
from megablocks_core.train.watch import watch as watch
