"""Indexed datasets from and to Hugging Face ``datasets``, OLMo's NumPy files and MDS shards.

Loads NumPy only; pyarrow, zstandard and tokenizers come with the format that needs them.
"""

from megablocks_core.data.convert.converting import ConvertReport as ConvertReport
from megablocks_core.data.convert.converting import convert as convert
from megablocks_core.data.convert.documents import BadSource as BadSource
