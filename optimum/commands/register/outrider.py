"""`optimum-cli export outrider`: the same command as `python -m export bundle`, where Hugging Face users look for it.

Optimum loads every module of the namespace package `optimum.commands.register` at start-up, so this one imports
nothing heavy; neither it nor its parents may have an `__init__.py` (PEP 420).
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser

from optimum.commands.base import BaseOptimumCLICommand, CommandInfo
from optimum.commands.export.base import ExportCommand


class OutriderExportCommand(BaseOptimumCLICommand):
    COMMAND = CommandInfo(
        name="outrider", help="Export a MoA drafter to an Outrider bundle for ONNX Runtime and ExecuTorch."
    )

    @staticmethod
    def parse_args(parser: ArgumentParser) -> None:
        from export.bundle.bundle_options import BundleOptions
        from export.options import add_options

        add_options(parser, BundleOptions)

    def run(self) -> None:
        from export.__main__ import guarded, run_bundle
        from export.bundle.bundle_options import BundleOptions
        from export.options import read_options

        sys.exit(guarded(lambda: run_bundle(read_options(BundleOptions, self.args))))


REGISTER_COMMANDS = [(OutriderExportCommand, ExportCommand)]
