"""`python -m android_demo.ci apk`, `aar`, `core`, `test-core`, `engines`, `test-app`, `fetch [PART]` or `clean`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from android_demo.ci import aar, apk, app, core, engines, signing, store
from android_demo.ci.core import BuildError
from android_demo.ci.pins import FetchError, cache_folder, needed_by, read_pins

#: files that each command takes from the lock, so that all of them are announced at once
PARTS = {
    "core": ("core",), "test-core": ("core",), "engines": ("core", "engines"), "test-app": ("core", "engines"),
    "aar": ("core", "engines"), "apk": ("core", "engines", "apk"),
}  # fmt: skip


def main() -> int:
    arguments = arguments_of()
    try:
        match arguments.command:
            case "fetch":
                fetch(arguments.part, arguments.dry_run)
            case "clean":
                print(f"{store.clean(cache_folder()) / store.MB:.0f} MB of downloads removed from {cache_folder()}")
            case _:
                build(arguments)
    except (FetchError, BuildError) as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; complete downloads are kept", file=sys.stderr)
        return 130
    return 0


def fetch(part: str | None, dry_run: bool) -> None:
    """Download the files of a part, or of everything; dry_run: only print what would be downloaded."""
    pins = needed_by(part, read_pins()) if part else read_pins()
    if dry_run:
        print(store.announced(store.absent(pins, cache_folder()), cache_folder()) or "nothing to download")
        return
    for folder in store.provided(*dict.fromkeys(name for pin in pins for name in pin.need)).values():
        print(folder)


def build(arguments: argparse.Namespace) -> None:
    """Fetch what the command needs, and run it."""
    key = None
    if arguments.command == "apk" and arguments.keystore:
        key = signing.Key.of(arguments.keystore, arguments.key_alias)
    executorch = arguments.command == "apk" and arguments.executorch
    store.provided(*PARTS[arguments.command], *(["fbjni"] if executorch else []))
    tools = core.Toolchain.fetched()
    match arguments.command:
        case "core":
            print(core.build(tools))
        case "test-core":
            core.run_tests(core.build_tests(tools), core.OUTPUT / "report")
        case "engines":
            print(engines.build(tools, engines.Libraries.fetched()))
        case "test-app":
            core.run_tests(app.build_tests(tools, engines.Libraries.fetched()), app.OUTPUT / "report")
        case "aar":
            file = aar.build()
            print(f"{file}: {file.stat().st_size / store.MB:.2f} MB, and {aar.TESTING} and their POMs beside it")
            if arguments.maven:
                place = aar.install(file.parent, arguments.maven)
                for name in aar.ARTIFACTS:
                    print(f"{aar.GROUP}:{name}:{core.versions()['appVersion']} in {place}")
        case "apk":
            kind = apk.Kind(tuple(arguments.abi or apk.ABIS[:1]), arguments.executorch, arguments.bundle, key)
            sizes = ", ".join(f"{name} {size:.1f}" for name, size in apk.parts(apk.build(kind)).items())
            signed = f"key {key.alias!r} of {key.keystore}" if key else "a debug key; --keystore signs with your own"
            print(f"{kind.file}: {kind.file.stat().st_size / store.MB:.1f} MB ({sizes}), signed with {signed}")


def arguments_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m android_demo.ci", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    packing = commands.add_parser("apk", help="build the app and sign it")
    packing.add_argument("--abi", action="append", choices=apk.ABIS, help="of the phone; twice for both")
    packing.add_argument("--executorch", action="store_true", help="ship ExecuTorch beside ONNX Runtime")
    packing.add_argument("--bundle", type=Path, default=core.BUNDLE, help="to ship in the APK (default: %(default)s)")
    packing.add_argument("--no-bundle", action="store_const", const=None, dest="bundle", help="ship none")
    packing.add_argument(
        "--keystore", type=Path, metavar="FILE",
        help=f"sign with a key of this keystore, whose password is in the environment as {signing.KEYSTORE_PASSWORD}, "
             f"and as {signing.KEY_PASSWORD} where the key has one of its own (default: a debug key)",
    )  # fmt: skip
    packing.add_argument("--key-alias", metavar="NAME", help="which key of the keystore")
    library = commands.add_parser("aar", help="pack core and engines as a library that an app adds to its build")
    library.add_argument("--maven", type=Path, metavar="FOLDER", help="also put it into this Maven repository")
    commands.add_parser("core", help="compile android_demo/core")
    commands.add_parser("test-core", help="compile android_demo/core and run its tests on the desktop JVM")
    commands.add_parser("engines", help="compile android_demo/engines")
    commands.add_parser("test-app", help="run the tests of the app's own logic on the desktop JVM")
    fetching = commands.add_parser("fetch", help="download, check and unpack the pins")
    fetching.add_argument("part", nargs="?", help="only what this part needs, such as core")
    fetching.add_argument("--dry-run", action="store_true", help="only print what would be downloaded")
    commands.add_parser("clean", help="remove what was downloaded and unpacked")
    arguments = parser.parse_args()
    if arguments.command == "apk" and (arguments.keystore is None) != (arguments.key_alias is None):
        parser.error("--keystore and --key-alias go together")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
