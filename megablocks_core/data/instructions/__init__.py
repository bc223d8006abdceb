"""Instruction data: conversations and pairs of answers to ids, and samples of them and documents.

Loads NumPy only; tokenizers, Jinja and Parquet come with the input that needs them.
"""

from megablocks_core.data.instructions.conversations import (
    PackedConversations as PackedConversations,
)
from megablocks_core.data.instructions.conversations import PackingReport as PackingReport
from megablocks_core.data.instructions.curricula import length_curriculum as length_curriculum
from megablocks_core.data.instructions.curricula import length_stages as length_stages
from megablocks_core.data.instructions.decomposed import (
    DecomposedDocuments as DecomposedDocuments,
)
from megablocks_core.data.instructions.documents import PackedDocuments as PackedDocuments
from megablocks_core.data.instructions.middle import FillInTheMiddle as FillInTheMiddle
from megablocks_core.data.instructions.pairs import PreferencePairs as PreferencePairs
from megablocks_core.data.instructions.preparing import InstructionReport as InstructionReport
from megablocks_core.data.instructions.preparing import (
    prepare_conversations as prepare_conversations,
)
from megablocks_core.data.instructions.preparing import prepare_preferences as prepare_preferences
from megablocks_core.data.instructions.schemas import SCHEMAS as SCHEMAS
from megablocks_core.data.instructions.templates import CHATML as CHATML
from megablocks_core.data.instructions.templates import ChatTemplate as ChatTemplate
from megablocks_core.data.tokenize.reading import BadText as BadText
