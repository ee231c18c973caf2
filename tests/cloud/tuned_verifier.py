"""A verifier with other constants, for tests that cannot wait as long as the product does.

    python -m tests.cloud.tuned_verifier --set cloud.server.limits.REQUEST_SECONDS=2 ...

--module: the command to run, by default `cloud.verifier`; all other flags are its own.
"""

from __future__ import annotations

import argparse
import importlib
import sys


def main() -> int:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--set", action="append", default=[], metavar="MODULE.NAME=VALUE")
    parser.add_argument("--module", default="cloud.verifier")
    options, rest = parser.parse_known_args()
    for each in options.set:
        name, _, value = each.partition("=")
        module, _, constant = name.rpartition(".")
        place = importlib.import_module(module)
        setattr(place, constant, type(getattr(place, constant))(value))
    status: int = importlib.import_module(options.module).main(rest)
    return status


if __name__ == "__main__":
    sys.exit(main())
