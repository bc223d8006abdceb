"""What a transformers model that is cut has in place of its own methods."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from megablocks_core.groups import Group, gather_whole
from megablocks_core.parallel.losses.cross_entropy import vocab_parallel_cross_entropy


@dataclass(frozen=True)
class VocabParallelLoss:
    """The causal language-model loss of a transformers model, from logits that are cut.

    Labels are shifted here, as its own loss does; with ``num_items_in_batch`` the sum is
    divided by that number, else the mean over labels that are not ignored is taken. Sends
    what ``vocab_parallel_cross_entropy`` sends.
    """

    group: Group

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor,
        vocab_size: int,
        num_items_in_batch: Tensor | int | None = None,
        ignore_index: int = -100,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss; what transformers passes beyond these arguments is not used by its own."""
        if shift_labels is None:
            shift_labels = pad(labels, (0, 1), value=ignore_index)[..., 1:]
        loss = vocab_parallel_cross_entropy(
            logits,
            shift_labels,
            vocab_size=vocab_size,
            ignore_index=ignore_index,
            reduction="mean" if num_items_in_batch is None else "sum",
            group=self.group,
        )
        return loss if num_items_in_batch is None else loss / num_items_in_batch


def save_pretrained(
    module: Any, group: Group, save_directory: Any, is_main_process: bool = True, **kwargs: Any
) -> None:
    """``save_pretrained`` of whole tensors, by the first rank; every rank must call it."""
    whole = gather_whole(module)
    failure = None
    if group.rank == 0:
        try:
            type(module).save_pretrained(
                module, save_directory, is_main_process=is_main_process, state_dict=whole, **kwargs
            )
        except Exception as error:
            failure = error
    told = group.broadcast_object(None if failure is None else repr(failure))
    if failure is not None:
        raise failure
    if told is not None:
        raise RuntimeError(f"the first rank could not save to {save_directory}: {told}")
