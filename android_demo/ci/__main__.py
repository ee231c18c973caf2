"""`python -m android_demo.ci fetch [PART]`, `core`, `test-core` or `engines`."""

from __future__ import annotations

import argparse
import sys

from android_demo.ci import core, engines
from android_demo.ci.pins import FetchError, cache_folder, fetch, needed_by, read_pins


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m android_demo.ci", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch", help="download and check the pins")
    fetching.add_argument("part", nargs="?", help="only what this part needs, such as core")
    commands.add_parser("core", help="compile android_demo/core")
    commands.add_parser("test-core", help="compile android_demo/core and run its tests on the desktop JVM")
    commands.add_parser("engines", help="compile android_demo/engines")
    arguments = parser.parse_args()
    try:
        if arguments.command == "fetch":
            pins = read_pins()
            for pin in needed_by(arguments.part, pins) if arguments.part else pins:
                print(fetch(pin, cache_folder()))
        elif arguments.command == "engines":
            print(engines.build(core.Toolchain.fetched(), engines.Libraries.fetched()))
        else:
            tools = core.Toolchain.fetched()
            print(core.build(tools))
            if arguments.command == "test-core":
                core.run_tests(core.build_tests(tools), core.OUTPUT / "report")
    except (FetchError, core.BuildError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
