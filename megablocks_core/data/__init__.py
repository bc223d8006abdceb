"""Token data: the indexed dataset on disk, samples in an order that resumes, and batches.

Loads NumPy only; torch comes with the first step of a ``Loader``.
"""

from megablocks_core.data.blended import BlendedDataset as BlendedDataset
from megablocks_core.data.builder import IndexedDatasetBuilder as IndexedDatasetBuilder
from megablocks_core.data.builder import smallest_dtype as smallest_dtype
from megablocks_core.data.byte_documents import END_OF_DOCUMENT as END_OF_DOCUMENT
from megablocks_core.data.byte_documents import VOCAB_SIZE as VOCAB_SIZE
from megablocks_core.data.byte_documents import ByteCounts as ByteCounts
from megablocks_core.data.byte_documents import decode_bytes as decode_bytes
from megablocks_core.data.byte_documents import write_byte_documents as write_byte_documents
from megablocks_core.data.collate import collate_packed as collate_packed
from megablocks_core.data.collate import dense_mask as dense_mask
from megablocks_core.data.content import split_by_content as split_by_content
from megablocks_core.data.gather import gather_tokens as gather_tokens
from megablocks_core.data.gpt import GPTDataset as GPTDataset
from megablocks_core.data.indexed import IndexedDataset as IndexedDataset
from megablocks_core.data.loader import Loader as Loader
from megablocks_core.data.loader import Step as Step
from megablocks_core.data.loader import as_tensors as as_tensors
from megablocks_core.data.manifest import Manifest as Manifest
from megablocks_core.data.megatron_order import MegatronOrder as MegatronOrder
from megablocks_core.data.packing import Bins as Bins
from megablocks_core.data.packing import best_fit_decreasing as best_fit_decreasing
from megablocks_core.data.packing import first_fit_decreasing as first_fit_decreasing
from megablocks_core.data.permutation import Permutation as Permutation
from megablocks_core.data.place import Place as Place
from megablocks_core.data.split import SequenceSplit as SequenceSplit
from megablocks_core.data.split import Split as Split
from megablocks_core.data.split import split_documents as split_documents
from megablocks_core.data.split import split_sequences as split_sequences
from megablocks_core.data.texts import read_texts as read_texts
from megablocks_core.data.texts import shuffled_pieces as shuffled_pieces
from megablocks_core.data.texts import standard_library as standard_library
