"""Parts of a training loop that you write: metrics, timing, evaluation, and the report."""

from megablocks_core.train.evaluate import evaluate as evaluate
from megablocks_core.train.evaluate import next_token_loss as next_token_loss
from megablocks_core.train.folder import RunFolder as RunFolder
from megablocks_core.train.folder import add_to_summary as add_to_summary
from megablocks_core.train.folder import read_run as read_run
from megablocks_core.train.lines import JsonLines as JsonLines
from megablocks_core.train.lines import read_lines as read_lines
from megablocks_core.train.machine import matmul_peak as matmul_peak
from megablocks_core.train.metrics import Mean as Mean
from megablocks_core.train.metrics import Metrics as Metrics
from megablocks_core.train.metrics import pooled as pooled
from megablocks_core.train.progress import Progress as Progress
from megablocks_core.train.record import run_record as run_record
from megablocks_core.train.timing import StepTimer as StepTimer
