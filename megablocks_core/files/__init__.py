"""Files and folders that appear whole under their name, or not at all, and outlive a crash.

Loads the standard library only. The writer of safetensors files, which needs torch, is
imported from ``files.safetensors``.
"""

from megablocks_core.files.atomic import NewFolder as NewFolder
from megablocks_core.files.atomic import check_new as check_new
from megablocks_core.files.atomic import create_file as create_file
from megablocks_core.files.atomic import is_removed as is_removed
from megablocks_core.files.atomic import is_unfinished as is_unfinished
from megablocks_core.files.atomic import make_folder as make_folder
from megablocks_core.files.atomic import remove as remove
from megablocks_core.files.atomic import replace_file as replace_file
from megablocks_core.files.atomic import sync_file as sync_file
from megablocks_core.files.atomic import sync_folder as sync_folder
from megablocks_core.files.json import read_json as read_json
