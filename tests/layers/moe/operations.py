"""Which operations run, and which of them may vary between runs."""

from torch.utils._python_dispatch import TorchDispatchMode

# Those of torch.use_deterministic_algorithms that such code might come to.
VARYING = {
    *("index_add", "index_add_", "scatter_add", "scatter_add_", "scatter_reduce", "histc"),
    *("index_put", "index_put_", "_index_put_impl_", "put_", "bincount", "index_copy"),
    *("index_copy_", "scatter_reduce_", "index_reduce", "kthvalue", "embedding_dense_backward"),
    *("gather_backward", "repeat_interleave", "median", "masked_scatter"),
}


class Operations(TorchDispatchMode):
    """Notes the names of all that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func._schema.name.partition("::")[2])
        return func(*args, **(kwargs or {}))
