"""`python -m android_demo.ci fetch [PART]`, `core`, `test-core`, `engines`, `test-app` or `apk`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from android_demo.ci import apk, app, core, engines
from android_demo.ci.pins import FetchError, cache_folder, fetch, needed_by, read_pins


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m android_demo.ci", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch", help="download and check the pins")
    fetching.add_argument("part", nargs="?", help="only what this part needs, such as core")
    commands.add_parser("core", help="compile android_demo/core")
    commands.add_parser("test-core", help="compile android_demo/core and run its tests on the desktop JVM")
    commands.add_parser("engines", help="compile android_demo/engines")
    commands.add_parser("test-app", help="run the tests of the app's own logic on the desktop JVM")
    packing = commands.add_parser("apk", help="build the app and sign it with a debug key")
    packing.add_argument("--abi", action="append", choices=apk.ABIS, help="of the phone; twice for both")
    packing.add_argument("--executorch", action="store_true", help="ship ExecuTorch beside ONNX Runtime")
    packing.add_argument("--bundle", type=Path, default=core.BUNDLE, help="to ship in the APK (default: %(default)s)")
    packing.add_argument("--no-bundle", action="store_const", const=None, dest="bundle", help="ship none")
    arguments = parser.parse_args()
    try:
        if arguments.command == "fetch":
            pins = read_pins()
            for pin in needed_by(arguments.part, pins) if arguments.part else pins:
                print(fetch(pin, cache_folder()))
        elif arguments.command == "engines":
            print(engines.build(core.Toolchain.fetched(), engines.Libraries.fetched()))
        elif arguments.command == "test-app":
            core.run_tests(
                app.build_tests(core.Toolchain.fetched(), engines.Libraries.fetched()), app.OUTPUT / "report"
            )
        elif arguments.command == "apk":
            kind = apk.Kind(tuple(arguments.abi or apk.ABIS[:1]), arguments.executorch, arguments.bundle)
            sizes = ", ".join(f"{name} {size:.1f}" for name, size in apk.parts(apk.build(kind)).items())
            print(f"{kind.file}: {kind.file.stat().st_size / 1e6:.1f} MB ({sizes})")
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
