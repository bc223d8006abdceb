"""Kullback-Leibler divergences of two softmaxes, from numbers that add up over a vocabulary.

Dimensions: n tokens, V the whole vocabulary, b columns of it, K stored entries of a token; P
parts of the vocabulary, each with k numbers a token.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megablocks_core.parallel.losses.chunked_head import maxima, merge_exponentials


class WholeTeacher(NamedTuple):
    """Divergence from a teacher whose logits are all there.

    The numbers are both softmaxes' maximum and sum of exponentials, and the sum of logit
    differences weighted by the exponentials of the distribution that the divergence is of.

    Attributes:
        logits_of: The teacher's logits [n b], over the temperature, from a first column and a
            number of columns.
        reverse: Student from teacher, instead of teacher from student.
        temperature: Divides the student's logits.
    """

    logits_of: Callable[[int, int], Tensor]
    reverse: bool
    temperature: float

    def partial_(self, x_nb: Tensor, first: int) -> Tensor:
        """The numbers of some columns; the logits stay, over the temperature."""
        x_nb.div_(self.temperature)
        y_nb = self.logits_of(first, x_nb.shape[-1])
        top_x_n, top_y_n = maxima(x_nb), maxima(y_nb)
        exp_x_nb = torch.sub(x_nb, top_x_n.unsqueeze(-1)).exp_()
        exp_y_nb = torch.sub(y_nb, top_y_n.unsqueeze(-1)).exp_()
        exp_nb = exp_x_nb if self.reverse else exp_y_nb
        gap_n = _without_mass_nothing(exp_nb, y_nb - x_nb).sum(-1)
        return torch.stack([top_x_n, exp_x_nb.sum(-1), top_y_n, exp_y_nb.sum(-1), gap_n])

    def prepare_(self, x_nb: Tensor, first: int, top_n: Tensor) -> None:
        """Divide logits by the temperature."""
        x_nb.div_(self.temperature)

    def merge(self, parts_Pkn: Tensor) -> Tensor:
        """The numbers of all parts together."""
        top_x_Pn, exp_x_Pn, top_y_Pn, exp_y_Pn, gap_Pn = parts_Pkn.unbind(1)
        if self.reverse:
            top_x_n, exp_x_n, gap_n = merge_exponentials(top_x_Pn, exp_x_Pn, gap_Pn)
            top_y_n, exp_y_n = merge_exponentials(top_y_Pn, exp_y_Pn)
        else:
            top_x_n, exp_x_n = merge_exponentials(top_x_Pn, exp_x_Pn)
            top_y_n, exp_y_n, gap_n = merge_exponentials(top_y_Pn, exp_y_Pn, gap_Pn)
        return torch.stack([top_x_n, exp_x_n, top_y_n, exp_y_n, gap_n])

    def losses(self, sums_kn: Tensor) -> Tensor:
        """Each token's divergence, in float64."""
        top_x_n, exp_x_n, top_y_n, exp_y_n, gap_n = sums_kn.double()
        mean_gap_n = gap_n / (exp_x_n if self.reverse else exp_y_n)
        loss_n = mean_gap_n + (exp_x_n / exp_y_n).log() + top_x_n - top_y_n
        return -loss_n if self.reverse else loss_n

    def differentiate_(
        self, x_nb: Tensor, first: int, part_kn: Tensor, sums_kn: Tensor, scale_n: Tensor
    ) -> None:
        """The gradient in the logits, in the place of what ``partial_`` left."""
        top_x_n, exp_x_n, top_y_n, exp_y_n, _ = sums_kn
        y_nb = self.logits_of(first, x_nb.shape[-1]) - top_y_n.unsqueeze(-1)
        x_nb.sub_(top_x_n.unsqueeze(-1))
        if self.reverse:
            loss_n = self.losses(sums_kn).to(x_nb.dtype)
            shift_n = (exp_y_n / exp_x_n).log() - loss_n
            gap_nb = (x_nb - y_nb).add_(shift_n.unsqueeze(-1))
            x_nb.exp_().div_(exp_x_n.unsqueeze(-1))
            x_nb.copy_(_without_mass_nothing(x_nb, gap_nb))
        else:
            x_nb.exp_().div_(exp_x_n.unsqueeze(-1))
            x_nb.sub_(y_nb.exp_().div_(exp_y_n.unsqueeze(-1)))
        x_nb.mul_((scale_n / self.temperature).unsqueeze(-1))


class TopKTeacher(NamedTuple):
    """Divergence from a teacher of whom the largest probabilities are known.

    All other columns are one class more. The numbers are the student's maximum, its sum of
    exponentials over that class, and its stored logits.

    Attributes:
        log_probs_nK: The teacher's, at temperature 1.
        indices_nK: Their columns.
        renormalize: The teacher has no mass in the other columns; else what is missing to 1.
        reverse: Student from teacher, instead of teacher from student.
        temperature: Divides the logits.
        complete: There are no other columns: nothing is missing, for want of digits either.
    """

    log_probs_nK: Tensor
    indices_nK: Tensor
    renormalize: bool
    reverse: bool
    temperature: float
    complete: bool = False

    def partial_(self, x_nb: Tensor, first: int) -> Tensor:
        """The numbers of some columns; exponentials of those not stored stay."""
        x_nb.div_(self.temperature)
        top_n, stored_nK = maxima(x_nb), self._pick(x_nb, first)
        self._exp_rest_(x_nb, first, top_n)
        return torch.stack([top_n, x_nb.sum(-1), *stored_nK.unbind(-1)])

    def prepare_(self, x_nb: Tensor, first: int, top_n: Tensor) -> None:
        """Make of logits the exponentials of those not stored."""
        self._exp_rest_(x_nb.div_(self.temperature), first, top_n)

    def merge(self, parts_Pkn: Tensor) -> Tensor:
        """The numbers of all parts together."""
        top_Pn, rest_Pn, *stored_Pn = parts_Pkn.unbind(1)
        merged = merge_exponentials(top_Pn, rest_Pn)
        return torch.stack([*merged, *(x_Pn.sum(0) for x_Pn in stored_Pn)])

    def losses(self, sums_kn: Tensor) -> Tensor:
        """Each token's divergence, in float64."""
        log_p_nC, log_q_nC, _ = self._classes(sums_kn)
        if self.reverse:
            return _without_mass_nothing(log_p_nC.exp(), log_p_nC - log_q_nC).sum(-1)
        return _without_mass_nothing(log_q_nC.exp(), log_q_nC - log_p_nC).sum(-1)

    def differentiate_(
        self, x_nb: Tensor, first: int, part_kn: Tensor, sums_kn: Tensor, scale_n: Tensor
    ) -> None:
        """The gradient in the logits, in the place of what ``partial_`` left."""
        log_p_nC, log_q_nC, lse_n = self._classes(sums_kn)
        p_nC, q_nC = log_p_nC.exp(), log_q_nC.exp()
        if self.reverse:
            loss_n1 = self.losses(sums_kn).unsqueeze(-1)
            dx_nC = _without_mass_nothing(p_nC, log_p_nC - log_q_nC - loss_n1)
        else:
            dx_nC = q_nC.sum(-1, keepdim=True) * p_nC - q_nC
        dx_nC *= scale_n.unsqueeze(-1) / self.temperature
        # The rest's columns share its gradient as they share its mass.
        rest_n = dx_nC[:, -1]
        share_n = torch.where(
            rest_n == 0, 0.0, rest_n * (part_kn[0] - lse_n - log_p_nC[:, -1]).exp()
        )
        largest = torch.finfo(x_nb.dtype).max
        x_nb.mul_(share_n.clamp(-largest, largest).to(x_nb.dtype).unsqueeze(-1))
        self._add(x_nb, first, dx_nC[:, :-1].to(x_nb.dtype))

    def _exp_rest_(self, x_nb: Tensor, first: int, top_n: Tensor) -> None:
        x_nb.sub_(top_n.unsqueeze(-1)).exp_()
        # Stored columns become zero: the rest is summed without them, not by a difference.
        self._add(x_nb, first, -self._pick(x_nb, first))

    def _classes(self, sums_kn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities of student and teacher [n K + 1], and the student's log-sum-exp."""
        # Neither the student's rest nor the teacher's is nothing, for want of digits.
        rest_n = sums_kn[1].clamp(min=torch.finfo(sums_kn.dtype).tiny).double()
        log_rest_n, stored_nK = rest_n.log() + sums_kn[0], sums_kn[2:].T.double()
        nothing_n = torch.full_like(log_rest_n, -torch.inf)
        if self.complete:
            log_rest_n = nothing_n
        x_nC = torch.cat([stored_nK, log_rest_n.unsqueeze(-1)], dim=-1)
        log_q_nK, log_missing_n = self.log_probs_nK.to(x_nC.dtype), nothing_n
        if self.renormalize:
            log_q_nK = (log_q_nK / self.temperature).log_softmax(-1)
        elif not self.complete:
            digits = torch.promote_types(self.log_probs_nK.dtype, torch.float32)
            missing_n = 1 - log_q_nK.exp().sum(-1)
            log_missing_n = missing_n.clamp(min=torch.finfo(digits).eps).log()
        log_q_nC = torch.cat([log_q_nK, log_missing_n.unsqueeze(-1)], dim=-1)
        return x_nC.log_softmax(-1), log_q_nC, x_nC.logsumexp(-1)

    def _pick(self, x_nb: Tensor, first: int) -> Tensor:
        """The block's entries in stored columns, zero for those of other blocks."""
        here_nK, place_nK = self._places(x_nb, first)
        if x_nb.shape[-1] == 0:
            return x_nb.new_zeros(place_nK.shape)
        return torch.where(here_nK, x_nb.gather(-1, place_nK), 0.0)

    def _add(self, x_nb: Tensor, first: int, values_nK: Tensor) -> None:
        here_nK, place_nK = self._places(x_nb, first)
        if x_nb.shape[-1]:
            x_nb.scatter_add_(-1, place_nK, torch.where(here_nK, values_nK, 0.0))

    def _places(self, x_nb: Tensor, first: int) -> tuple[Tensor, Tensor]:
        index_nK, width = self.indices_nK - first, x_nb.shape[-1]
        return (index_nK >= 0) & (index_nK < width), index_nK.clamp(0, max(width - 1, 0))


def _without_mass_nothing(mass: Tensor, value: Tensor) -> Tensor:
    """Their product, which is zero where the mass is, however infinite the value."""
    return torch.where(mass > 0, mass * value, 0.0)
