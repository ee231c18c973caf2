"""Torch networks: the target (full model) and the halves of the Mixture-of-Attentions drafter.

Import the module you need (`outrider_core.models.target`, `outrider_core.models.moa`); this package itself loads
nothing heavy.
"""

import logging

# transformers imports torchao if it is installed (the exporter needs it), and torchao and torch then warn about GPU
# kernels and about each other. None of that concerns the models here.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)
