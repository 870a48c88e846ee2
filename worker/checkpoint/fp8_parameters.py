"""Parameters that keep the 8 bits of a checkpoint, while their parts are read."""

from collections import defaultdict
from collections.abc import Mapping

import torch

from kernels.linear.fp8_linear import GROUP, Fp8Weight
from worker.checkpoint.tensors import ReadFp8


class Fp8Parameters:
    """The matrices in 8 bits read so far, by parameter. `shapes`: those of all parameters."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device) -> None:
        self._shapes, self._device = shapes, device
        self._values: dict[str, torch.Tensor] = {}
        self._scales: dict[str, list[tuple[slice, torch.Tensor]]] = defaultdict(list)

    def add(
        self, name: str, read: ReadFp8, dim: int, first: int, kept: range, order: torch.Tensor | None = None
    ) -> None:
        """Reads the part `kept` along `dim`, which a parameter has from `first` on. `order`: of its rows."""
        if name not in self._values:
            # Bytes, for which all operators are there. Zero bytes are zeros in e4m3.
            self._values[name] = torch.zeros(self._shapes[name], dtype=torch.uint8, device=self._device)
        if not len(kept):
            return
        values, scales = read(dim, kept)
        values = values.view(torch.uint8)
        if order is not None:
            values, scales = values[order.to(values.device)], scales[order.to(scales.device)]
        self._values[name].narrow(dim, first, len(kept)).copy_(values)
        rows = slice(first, first + len(kept)) if dim == 0 else slice(None)
        self._scales[name].append((rows, scales))

    def finish(self, name: str) -> Fp8Weight:
        """The parameter, all of whose parts were added, with zeros where it has none. Scales are those of groups of
        `GROUP` columns if a part has such."""
        values, parts = self._values.pop(name), self._scales.pop(name, [])
        groups = 1
        if any(scales.shape[1] > 1 for _, scales in parts):
            groups = -(-values.shape[1] // GROUP)
        all_scales = torch.ones(len(values), groups, device=self._device)
        for rows, scales in parts:
            own = all_scales[rows]
            own[:, : scales.shape[1] if scales.shape[1] > 1 else groups] = scales
        return Fp8Weight(values.view(torch.float8_e4m3fn), all_scales)
