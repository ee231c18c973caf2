"""`python -m edge_runtime`: the device's commands of `outrider` (chat, generate, serve, doctor)."""

import sys

from outrider.cli.device import main

if __name__ == "__main__":
    sys.exit(main(prog="python -m edge_runtime"))
