"""`python -m cloud.scale`: many replicas of the verifier behind one address, through Ray Serve.

Each replica is a process with its own target, drafter and engine thread, and serves the app of `cloud.app`. Sessions
live in one replica's memory, but OPEN carries all token ids: any replica resumes any session, so replicas may come, go
and die. Ray is imported late, so that --help and wrong flags are answered at once. The parts are in `cloud.scaling`;
`cloud.scale:build` is the import path for Ray Serve's own commands.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from pydantic import ValidationError
from pydantic_settings import SettingsError

from cloud.scaling.driver import leave, reload, run, say
from cloud.scaling.options import Proxy, Scale, ScaleError
from cloud.scaling.replica import build
from cloud.server.accounts import Accounts, AuthError
from cloud.server.tls import Certificate, CertificateError
from cloud.settings import Settings, describe_errors, read_settings
from outrider_core.cache import expanded

__all__ = ["build", "main"]

EPILOG = """\
Flags after -- are the verifier's own and hold for every replica (python -m cloud.verifier --help):

  python -m cloud.scale --replicas 2 -- --model smollm2-135m-instruct --threads 1
  python -m cloud.scale --replicas 2 --max-replicas 8 --gpus-per-replica 1 -- --model /models/m --drafter /models/d

Ctrl-C or SIGTERM stops everything this command has started.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the replicas until a signal. Returns the exit status; every failure is one line on stderr."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    signal.signal(signal.SIGHUP, reload)
    words = list(sys.argv[1:] if argv is None else argv)
    split = words.index("--") if "--" in words else len(words)
    parsed = _parser().parse_args(words[:split])
    try:
        scale = Scale(**{name: getattr(parsed, name) for name in Scale.model_fields})
        proxy = Proxy(parsed.proxy)
        host = "0.0.0.0" if proxy is Proxy.HAPROXY else parsed.http_host
        settings = _settings(words[split + 1 :], host, parsed.http_port)
        if proxy is Proxy.HAPROXY and (scale.sticky or parsed.ray_address):
            raise ScaleError("--proxy haproxy excludes --sticky and --ray-address; see docs/operating.md")
        if proxy is Proxy.HAPROXY and settings.ssl_certfile is not None:
            raise ScaleError("--proxy haproxy speaks plain HTTP: terminate TLS in front of it, without --ssl-certfile")
        Certificate.of(settings)
        if settings.auth_file is not None:
            Accounts(settings.auth_file)  # once here, instead of in every replica
        run(scale, settings, parsed.http_host, proxy, parsed.ray_address)
    except ValidationError as error:
        return _fail(describe_errors(error))
    except SettingsError as error:
        return _fail(str(error.__cause__ or error))
    except (ScaleError, AuthError, CertificateError, OSError, ValueError) as error:
        return _fail(str(error))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cloud.scale",
        description="Serve a target to Outrider devices from many replicas of the verifier behind one address.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="python -m cloud.scale [flags] [-- verifier flags]",
    )
    for name, field in Scale.model_fields.items():
        flag, text = "--" + name.replace("_", "-"), field.description
        if field.annotation is bool:
            parser.add_argument(flag, action="store_true", help=text)
        else:
            parser.add_argument(flag, default=field.default, metavar="N", help=f"{text} (default: {field.default})")
    parser.add_argument("--http-host", default="127.0.0.1", metavar="HOST", help="address to listen on")
    parser.add_argument("--http-port", type=int, default=8765, metavar="PORT", help="TCP port (default: 8765)")
    parser.add_argument(
        "--proxy",
        choices=[proxy.value for proxy in Proxy],
        default=Proxy.PYTHON.value,
        help="what moves bytes between devices and replicas; haproxy is faster, but listens on all addresses",
    )
    parser.add_argument(
        "--ray-address",
        metavar="ADDRESS",
        help="join this Ray cluster (auto: the one running on this machine); default: a local one for this command",
    )
    return parser


def _settings(flags: list[str], host: str, port: int) -> Settings:
    """Return the verifier's settings from its flags and VERIFIER_*, for the address that Serve will listen on."""
    for flag in flags:
        if flag.split("=")[0] in ("--host", "--port"):
            raise ScaleError(f"{flag} is the address of a single verifier; use --http-host and --http-port before --")
    address = ["--host", host, "--port", str(port)]
    settings = read_settings([*flags, *address], "python -m cloud.scale --")
    if settings.port == 0:
        raise ScaleError("--http-port: 0 is not a port that devices can be given; choose a free one")
    # replicas may start in another folder
    folder = expanded(settings.model)
    if folder.is_dir():
        settings.model = str(folder.resolve())
    for name in ("drafter", "auth_file", "ssl_certfile", "ssl_keyfile"):
        if (path := getattr(settings, name)) is not None:
            setattr(settings, name, expanded(path).resolve())
    return settings


def _fail(text: str) -> int:
    say(" ".join(text.split()))
    return 2


if __name__ == "__main__":
    sys.exit(main())
