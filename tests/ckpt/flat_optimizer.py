"""Adam whose state is flat, in buckets, padded and cut over ranks: what sharded optimizers do."""

import torch

from megablocks_core.ckpt.state.logical import LogicalField, LogicalState
from megablocks_core.groups import LOCAL


class FlatAdam:
    """Keeps master weights and moments in float32; each rank holds an equal part of each bucket.

    Args:
        buckets: Lists of parameters. Their elements, one after the other and padded, are a bucket.
        group: Ranks that hold the same parameters.
    """

    def __init__(self, buckets, *, group=LOCAL, lr=0.01):
        self.buckets, self.group, self.lr, self.steps = buckets, group, lr, 0
        self.state = []
        for bucket in buckets:
            numel = sum(parameter.numel() for parameter in bucket)
            length = -(-numel // group.size)
            self.state.append({name: torch.zeros(length) for name in ("exp_avg", "exp_avg_sq")})
            self.state[-1]["master"] = self._part(self._flat(bucket), length)

    def _flat(self, tensors):
        return torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])

    def _part(self, flat, length):
        padded = torch.cat([flat, torch.zeros(length * self.group.size - flat.numel())])
        return padded[length * self.group.rank :][:length].clone()

    @torch.no_grad()
    def step(self):
        self.steps += 1
        for bucket, state in zip(self.buckets, self.state, strict=True):
            grads = self._part(self._flat([one.grad for one in bucket]), len(state["master"]))
            state["exp_avg"].lerp_(grads, 0.1)
            state["exp_avg_sq"].lerp_(grads.square(), 0.001)
            state["master"] -= self.lr * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
            flat = torch.cat(self.group.all_gather(state["master"]))
            for parameter in bucket:
                part, flat = flat[: parameter.numel()], flat[parameter.numel() :]
                parameter.copy_(part.view(parameter.shape))

    def logical_state(self):
        """A field for each parameter of which this rank's part of a bucket holds something."""
        fields = []
        for bucket, state in zip(self.buckets, self.state, strict=True):
            length, start = len(state["master"]), 0
            first, last = length * self.group.rank, length * (self.group.rank + 1)
            for parameter in bucket:
                stop = start + parameter.numel()
                # The part after the last parameter is padding, which belongs to that one's range.
                end = last if parameter is bucket[-1] else min(stop, last)
                low = max(start, first)
                for name, tensor in state.items():
                    if low < end:
                        memory = tensor[low - first : end - first]
                        fields.append(
                            LogicalField(parameter, name, memory, (low - start, end - start))
                        )
                start = stop
        return LogicalState(fields, {"lr": self.lr, "steps": self.steps})

    def load_logical_values(self, values):
        self.lr, self.steps = values["lr"], values["steps"]
