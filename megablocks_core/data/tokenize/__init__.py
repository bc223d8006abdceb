"""Text files, JSON lines and Parquet to an indexed dataset; ``megablocks-tokenize`` is its command.

Loads NumPy only; tokenizers, Parquet and zstd come with the input that needs them.
"""

from megablocks_core.data.tokenize.reading import BadText as BadText
from megablocks_core.data.tokenize.tokenizing import TokenizeReport as TokenizeReport
from megablocks_core.data.tokenize.tokenizing import tokenize as tokenize
