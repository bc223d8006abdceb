"""Look at checkpoints, check, compare, convert, average and delete them: ``megablocks-ckpt``.

Everything reads a slab of a tensor at a time and writes through the library's own draft, so that
a result appears whole or not at all.
"""
