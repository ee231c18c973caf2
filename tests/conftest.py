"""Settings of every test."""

from __future__ import annotations

import torch

# Tiny models gain nothing from a second thread, and on a busy machine they wait for it at every operator.
torch.set_num_threads(1)
