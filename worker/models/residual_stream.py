"""The residual stream, which the sublayers of a decoder read and add to, and three ways to run that on a device.

A sublayer reads the stream through a norm (`project`, `project_activated`, `normalised`) and ends with a product that
is added to the stream (`add`, `add_product`). `worker.models.layer` says once which sublayers a layer has. The classes
here say which kernels that makes, and when the ranks of tensor parallelism sum their parts. The sublayers are the same
in each.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels.linear.any_linear import AnyLinear
from kernels.linear.fp8_linear import Fp8Linear
from kernels.linear.linear import Linear
from kernels.ops.activation import gelu_tanh_and_mul, silu_and_mul
from kernels.ops.norm import add_rms_norm, normalise, rms_norm
from worker.models.adapted_linear import AdaptedLinear
from worker.parallel.communicator import Communicator

Activation = Callable[..., torch.Tensor]
"""Activation of an MLP, of a tensor or of the sum of two: gated, `[n, 2 * size]` to `[n, size]`; without a gate,
`[n, size]` to the same."""

Part = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
"""Last operator of a sublayer, `[n, size]` to this rank's part of the output, `[n, hidden_size]`, in the second tensor
if given."""

FusedPart = Callable[[torch.Tensor, float, torch.Tensor | None, torch.Tensor | None], torch.Tensor]
"""A sublayer of one token with its norm: the hidden states, the epsilon of the norm, what to add to the output, and the
tensor to write to, if any."""

EMBEDDING_BUFFER = 2
"""Turn of `Communicator.reduce_buffer` for the sum of embeddings, and for a sum between two of a stream. The sums of a
stream alternate between turns 0 and 1, and the last sum of a step has turn 1 (`FirstSum`). So consecutive sums differ,
also from one step to the next."""


class FirstSum(NamedTuple):
    """The first of the sums over ranks that a stream makes: its `turn`, and whether it `is_apart`, which is a sum that
    goes through no shared memory."""

    turn: int = 0
    is_apart: bool = False

    @classmethod
    def of(cls, sums: int, follows_embedding: bool) -> "FirstSum":
        """Returns the first sum of a stream that makes the last `sums` sums of a step. An odd number begins with the
        turn that it ends with: an embedding's sum must be before the first one then, or the first one is apart."""
        return cls(sums % 2, sums % 2 == 1 and not follows_embedding)


_EVEN = FirstSum()


class ResidualStream:
    """Hidden states of all tokens of a batch: every kernel runs once for the whole batch. The default.

    An output is added to the hidden states as late as possible, by the norm that reads them next: one kernel adds and
    normalises, and with several GPUs of one machine it also sums the ranks' parts (`kernels.comm.all_reduce`: NCCL
    takes 19 us to begin what takes 5 us to send, 161 times in a decode step of a 70B model). On a single rank the
    product itself adds to the hidden states where it can (`Linear.add_to`).
    """

    def __init__(
        self,
        x: torch.Tensor,
        communicator: Communicator,
        eps: float,
        layer_inputs: torch.Tensor | None = None,
        first_sum: FirstSum = _EVEN,
    ) -> None:
        """x: `[n, hidden_size]`, contiguous, the same on all ranks of `communicator`. Overwritten. `eps` is that of all
        norms. `layer_inputs`: `[n, layers, size]`, for `worker.models.layer_inputs.LayerInput`."""
        self.x, self.eps, self.layer_inputs = x, eps, layer_inputs
        self._communicator = communicator
        self._turn, self._is_apart = first_sum
        # Output of the last sublayer where x lacks it: this rank's part, or the sum of all ranks' parts.
        self._update: torch.Tensor | None = None
        self._is_summed = False

    def project(self, norm: torch.Tensor | None, linear: AnyLinear, out: torch.Tensor | None = None) -> torch.Tensor:
        """Product of the normalised hidden states, `[n, linear's outputs]`, in `out` if given. norm: as for
        `kernels.ops.norm.normalise`, or None for the hidden states as they are."""
        return linear(self.normalised(norm), out)

    def project_activated(
        self, norm: torch.Tensor | None, linear: AnyLinear | AdaptedLinear, activation: Activation
    ) -> torch.Tensor:
        """`project`, followed by the activation: `[n, linear's outputs / 2]`, or without a gate all of them."""
        if isinstance(linear, AdaptedLinear):
            return activation(*linear.apart(self.normalised(norm)))
        return activation(linear(self.normalised(norm)))

    def add(self, linear: AnyLinear | AdaptedLinear, y: torch.Tensor, norm: torch.Tensor | None = None) -> None:
        """Adds the sum of all ranks' `linear(y)`, normalised if there is a `norm`. y: `[n, linear's inputs]`."""
        if norm is not None or self._communicator.size > 1:
            self.add_product(linear, y, norm)
        elif isinstance(linear, AdaptedLinear) and linear.adds:
            self._update, self._is_summed = linear.add_to(self.x, y), True
        elif isinstance(linear, Linear) and linear.adds:
            linear.add_to(self.x, y)
        else:
            self.add_product(linear, y)

    def add_product(self, product: Part, y: torch.Tensor, norm: torch.Tensor | None = None) -> None:
        """`add` for any last operator of a sublayer."""
        self._update, self._is_summed = product(y, self._reduce_buffer()), False
        if norm is not None:
            self._update, self._is_summed = rms_norm(self._communicator.all_reduce(self._update), norm, self.eps), True

    def add_sum(self, update: torch.Tensor) -> None:
        """Adds an output that is the same on all ranks, `[n, hidden_size]`."""
        self.complete()
        self._update, self._is_summed = update, True

    def scale(self, factor: torch.Tensor) -> None:
        """Multiplies the hidden states, with everything that was added, by a number: `[1]`."""
        self.complete().mul_(factor)

    def summed(self, product: Part, y: torch.Tensor, turn: int | None = None) -> torch.Tensor:
        """The sum of all ranks' `product(y)`, which is not added: `[n, hidden_size]`. `turn`: that of the sum, if the
        stream's own sums before and after it shall have other ones; by default it is one of them."""
        buffer = self._reduce_buffer(turn)
        return self._communicator.all_reduce(product(y, buffer))

    def sum_of_ranks(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' x, which may be overwritten."""
        return x if self._communicator.size == 1 else self._communicator.all_reduce(x)

    def complete(self) -> torch.Tensor:
        """The hidden states with everything that was added, `[n, hidden_size]`."""
        update = self._take_update()
        if update is None:
            return self.x
        return self.x.add_(update if self._is_summed else self._communicator.all_reduce(update))

    def normalised(self, norm: torch.Tensor | None) -> torch.Tensor:
        """The hidden states with everything that was added, normalised, `[n, hidden_size]`. norm: as for `project`."""
        if norm is None:
            return self.complete()
        if norm.ndim == 2:
            return normalise(self.complete(), norm, self.eps)
        update = self._take_update()
        if update is None:
            return rms_norm(self.x, norm, self.eps)
        add_and_norm = add_rms_norm if self._is_summed else self._communicator.add_rms_norm
        return add_and_norm(update, self.x, norm, self.eps)

    def _take_update(self) -> torch.Tensor | None:
        update, self._update = self._update, None
        return update

    def _reduce_buffer(self, turn: int | None = None) -> torch.Tensor | None:
        """Memory for this rank's part of the next sum (`Communicator.reduce_buffer`)."""
        if turn is None:
            turn, self._turn = self._turn, 1 - self._turn
            is_apart, self._is_apart = self._is_apart, False
            if is_apart:
                return None
        return self._communicator.reduce_buffer(len(self.x), self.x.shape[1], self.x.dtype, turn)


class HalfBatchStream(ResidualStream):
    """Hidden states of one half of a long batch, with tensor parallelism. While one half is summed, the other computes.

    With many tokens an all-reduce takes as long as a matrix product. It runs on a stream of its own here, from the end
    of the product until the norm that needs the sum. bench/RESULTS.md has no figure of a run without halves.
    """

    def __init__(self, x: torch.Tensor, communicator: Communicator, eps: float) -> None:
        super().__init__(x, communicator, eps)
        self._wait_for_sum: Callable[[], torch.Tensor] | None = None

    def add(self, linear: AnyLinear | AdaptedLinear, y: torch.Tensor, norm: torch.Tensor | None = None) -> None:
        self.add_product(linear, y, norm)

    def add_product(self, product: Part, y: torch.Tensor, norm: torch.Tensor | None = None) -> None:
        assert norm is None, "a norm of the output would need the sum at once"
        self._wait_for_sum, self._is_summed = self._communicator.all_reduce_async(product(y, None)), True

    def _take_update(self) -> torch.Tensor | None:
        wait, self._wait_for_sum = self._wait_for_sum, None
        return None if wait is None else wait()


class OneTokenStream(ResidualStream):
    """Hidden states of a single token on a GPU, which then only reads weights: GEMV kernels, five a layer with
    attention's excluded.

    Norm, activation and residual are part of the products (`kernels.linear.gemv`). On an H200, Llama-3.1-8B decodes one
    sequence at 233 tokens/s in bfloat16 and at 359 in fp8 (bench/RESULTS.md: gpu.llama8b, gpu.llama8b.fp8).
    """

    def project(self, norm: torch.Tensor | None, linear: AnyLinear, out: torch.Tensor | None = None) -> torch.Tensor:
        if not isinstance(linear, Linear | Fp8Linear):
            return super().project(norm, linear, out)
        from kernels.linear.gemv import gemv

        return gemv(self.x, linear.weight, linear.bias, linear.scales, norm=norm, eps=self.eps, out=out)

    def project_activated(
        self, norm: torch.Tensor | None, linear: AnyLinear | AdaptedLinear, activation: Activation
    ) -> torch.Tensor:
        if not isinstance(linear, Linear | Fp8Linear):
            return super().project_activated(norm, linear, activation)
        if activation not in (silu_and_mul, gelu_tanh_and_mul):
            return activation(self.project(norm, linear))
        from kernels.linear.gemv import gated_gemv

        gelu = activation is gelu_tanh_and_mul
        return gated_gemv(self.x, linear.weight, linear.bias, linear.scales, norm=norm, eps=self.eps, gelu=gelu)

    def add(self, linear: AnyLinear | AdaptedLinear, y: torch.Tensor, norm: torch.Tensor | None = None) -> None:
        if not isinstance(linear, Linear | Fp8Linear):
            self.add_product(linear, y, norm)
            return
        from kernels.linear.gemv import gemv

        assert norm is None, "the product adds its output to the hidden states"
        residual = self.x if self._communicator.rank == 0 else None  # only one rank's part of the sum includes it
        out = self._reduce_buffer()
        part = gemv(y, linear.weight, linear.bias, linear.scales, residual=residual, out=out)
        self.x = self._communicator.all_reduce(part)

    def add_product(self, product: Part, y: torch.Tensor, norm: torch.Tensor | None = None) -> None:
        assert norm is None, "the product adds its output to the hidden states"
        part = product(y, self._reduce_buffer())
        if self._communicator.rank == 0:  # only one rank's part of the sum includes them
            part += self.x
        self.x = self._communicator.all_reduce(part)

    def add_fused(self, product: FusedPart) -> None:
        """Adds the product of the normalised hidden states, which also adds the hidden states."""
        residual = self.x if self._communicator.rank == 0 else None  # only one rank's part of the sum includes it
        self.x = self._communicator.all_reduce(product(self.x, self.eps, residual, self._reduce_buffer()))
