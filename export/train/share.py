"""This process's share of a training run: all of it, or one of several ranks that torchrun started."""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

#: most characters of a word that ranks agree on
LONGEST_WORD = 32


@dataclass(frozen=True)
class Share:
    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls, device: str) -> tuple[Share, str]:
        """Return (share, this rank's own device). Joins the other ranks, if there are any."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(), device
        if device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}"
            torch.cuda.set_device(device)
        if not dist.is_initialized():
            dist.init_process_group("nccl" if device.startswith("cuda") else "gloo")
            atexit.register(dist.destroy_process_group)  # threads of gloo that outlive Python abort the process
        return cls(dist.get_rank(), size), device

    @property
    def first(self) -> bool:
        """Return whether this process reports and writes for all."""
        return self.rank == 0

    @contextmanager
    def first_then_all(self) -> Iterator[None]:
        """Wait for all ranks; the first runs the block, then the others do; wait for all again.

        For files that the first rank makes and the others read. Everything before the block is done on all ranks when
        it begins, and nothing after it begins before every rank has left it.
        """
        self._meet()
        if not self.first:
            self._meet()
        yield
        if self.first:
            self._meet()
        self._meet()

    def _meet(self) -> None:
        if self.size > 1:
            dist.barrier()

    def agreed(self, word: str, device: str) -> str:
        """Return the first rank's `word` on all ranks. device: this rank's own."""
        if self.size == 1:
            return word
        text = torch.tensor(list(word.ljust(LONGEST_WORD).encode()), dtype=torch.uint8, device=device)
        dist.broadcast(text, src=0)
        return bytes(text.tolist()).decode().strip()

    def average(self, parameters: Iterable[Tensor]) -> None:
        """Make the parameters' gradients the mean over all ranks."""
        if self.size == 1:
            return
        own = list(parameters)
        for parameter in own:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([parameter.grad.flatten() for parameter in own if parameter.grad is not None])
        dist.all_reduce(flat)
        flat /= self.size
        at = 0
        for parameter in own:
            assert parameter.grad is not None
            parameter.grad.copy_(flat[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()


#: a single process does everything
ALONE = Share()
