"""The verifier's settings: flags, `VERIFIER_*` environment variables and a TOML file, checked once at start."""

from __future__ import annotations

import argparse
import json
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, model_validator
from pydantic_settings import (
    BaseSettings,
    CliSettingsSource,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from outrider_core.protocol.tree import MAX_NODES
from outrider_core.serving import is_loopback
from outrider_core.targets.source import DEFAULT_TARGET


class Settings(BaseSettings):
    """Serve a full model (the target) to Outrider devices: verify their draft trees, decode, send the drafter's inputs.

    Every flag can also be set as VERIFIER_<NAME> in the environment or as a line of the --config file; flags win,
    then the environment.
    """

    model_config = SettingsConfigDict(
        env_prefix="VERIFIER_",
        cli_kebab_case=True,
        cli_hide_none_type=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
    )

    model: Annotated[str, Field(description="target: alias, Hugging Face id, folder, GGUF file or target bundle")] = (
        DEFAULT_TARGET
    )
    drafter: Annotated[
        Path | None,
        Field(
            description="drafter folder, trained on this target; default: the one that is installed. Without one, "
            "devices draft with an understudy"
        ),
    ] = None
    served_model_name: Annotated[str, Field(description="the target's name in /v1/models; empty: as --model")] = ""
    config: Annotated[Path | None, Field(description="TOML file with these settings")] = None
    print_config: Annotated[bool, Field(description="print the settings in effect as TOML and exit")] = False

    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="TCP port; 0 picks a free one")] = 8765
    auth_file: Annotated[
        Path | None,
        Field(description="hashed tokens and limits, made by python -m cloud.auth; SIGHUP reloads it"),
    ] = None
    ssl_certfile: Annotated[Path | None, Field(description="certificate chain, PEM")] = None
    ssl_keyfile: Annotated[Path | None, Field(description="its private key, PEM")] = None
    insecure: Annotated[bool, Field(description="listen beyond loopback without TLS or without authentication")] = False
    allow_origin: Annotated[
        list[str],
        Field(
            description="web pages that may connect, as https://host[:port]; others are refused. Add "
            "this verifier's own origin if its page has a name other than localhost, an IP address or --host"
        ),
    ] = []
    page: Annotated[
        Path | None,
        Field(description="folder of the web page to serve at /; default on loopback: what make web builds"),
    ] = None
    page_bundle: Annotated[Path, Field(description="bundle that the web page drafts with")] = Path("build/bundle")
    metrics_account: Annotated[
        str, Field(description="name of the account that may read /metrics from other machines; empty: any")
    ] = ""
    sockets_per_address: Annotated[
        int | None,
        Field(
            ge=0,
            description="open sockets per address (IPv6: per /64); 0: no limit; default: 1024, on loopback no limit",
        ),
    ] = None

    engine: Annotated[
        Literal["auto", "torch", "onnx", "vllm", "upstream"],
        Field(
            description="engine that runs the target. onnx: an 8-bit copy on the CPU, made at first start, whose "
            "results do not depend on the tree; vllm: vLLM, if installed; torch: the float32 reference; upstream: the "
            "server at --upstream; "
            "auto: on a GPU vllm, on a CPU onnx, or torch if --dtype is given or onnx does not run the model"
        ),
    ] = "auto"
    upstream: Annotated[
        str, Field(description="URL of a vLLM or SGLang server that serves --model, for --engine upstream")
    ] = ""
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "float64"],
        Field(
            description="the target's number format in torch or vLLM; auto: float32, with vLLM on a GPU the model's own"
        ),
    ] = "auto"
    device: Annotated[str, Field(description="torch device; auto uses CUDA if available")] = "auto"
    threads: Annotated[
        int, Field(ge=0, description="CPU threads of the target; 0: all cores but one (8 bits on two cores: both)")
    ] = 0
    tensor_parallel_size: Annotated[
        int, Field(ge=1, description="GPUs that share the target, each by a process that vLLM starts")
    ] = 1

    cuda_graphs: Annotated[
        Literal["on", "off"],
        Field(
            description="how vLLM runs steps on a GPU; on: compiled and recorded as CUDA graphs at start, which takes "
            "minutes; off: operation by operation"
        ),
    ] = "off"

    max_model_len: Annotated[
        int, Field(ge=2, le=1 << 17, description="longest sequence in tokens, as far as the target supports it")
    ] = 2048
    max_nodes: Annotated[int, Field(ge=0, le=MAX_NODES, description="most nodes of one draft tree")] = 128
    tree_budget: Annotated[
        int,
        Field(ge=0, le=MAX_NODES, description="nodes per tree to ask devices for; 0: choose by measured step times"),
    ] = 0
    max_sessions: Annotated[int, Field(ge=1, description="session records kept")] = 256
    kv_tokens: Annotated[int, Field(ge=1, description="key/value rows of all sessions together")] = 16384
    prefix_cache: Annotated[
        Literal["auto", "on", "off"],
        Field(
            description="compute what prompts of one account have in common only once. auto: with --auth-file; "
            "on: always; without accounts, response times then reveal what others have asked"
        ),
    ] = "auto"
    lookup: Annotated[
        Literal["auto", "on", "off"],
        Field(
            description="speculate from repeated text when the target decodes by itself (streams, chat completions) "
            "and it is faster. auto: only on the 8-bit engine, where output cannot change. Off with --tree-budget"
        ),
    ] = "auto"

    shutdown_timeout: Annotated[
        float, Field(ge=0, description="seconds that answers in progress may take after SIGTERM")
    ] = 20.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="lowest level that is logged")
    ] = "info"

    @model_validator(mode="after")
    def _check(self) -> Settings:
        for origin in self.allow_origin:
            try:
                named = origin == "null" or urlsplit(origin).hostname
            except ValueError:
                named = None
            if not named:
                raise ValueError(f"allow_origin {origin!r} is not an origin; write one as https://pages.example")
        if (self.ssl_certfile is None) != (self.ssl_keyfile is None):
            raise ValueError("ssl_certfile and ssl_keyfile go together; give both or none")
        self._check_engine()
        lacking = [
            name
            for name, value in (("--auth-file", self.auth_file), ("--ssl-certfile", self.ssl_certfile))
            if not value
        ]
        if lacking and not self.insecure and not is_loopback(self.host):
            raise ValueError(
                f"host {self.host} is reachable from outside without {' or '.join(lacking)}; "
                "use 127.0.0.1 behind a proxy that does both, or add --insecure"
            )
        least = self.max_model_len + self.max_nodes
        if self.kv_tokens < least:
            raise ValueError(
                f"kv_tokens {self.kv_tokens} cannot hold one session of max_model_len {self.max_model_len} and a tree "
                f"of max_nodes {self.max_nodes}; use at least {least}"
            )
        return self

    def _check_engine(self) -> None:
        """Raise ValueError for settings that the chosen engine would ignore, or cannot apply."""
        if self.engine == "onnx" and (named := self.torch_flags()):
            raise ValueError(f"--engine onnx does not support {', '.join(named)}; use --engine torch, or leave it out")
        if self.engine == "vllm" and "--device" in self.torch_flags():
            raise ValueError("--engine vllm does not support --device; vLLM uses the one it was built for")
        if self.engine not in ("auto", "vllm") and self.tensor_parallel_size > 1:
            raise ValueError(f"--engine {self.engine} does not support --tensor-parallel-size; use --engine vllm")
        if (self.engine == "upstream") != is_url(self.upstream):
            raise ValueError("--engine upstream and --upstream http://HOST:PORT go together")
        if self.engine == "upstream" and (named := self.torch_flags()):
            raise ValueError(f"--engine upstream does not support {', '.join(named)}: they are the other server's")

    def torch_flags(self) -> list[str]:
        """Return the given flags that the 8-bit engine does not have."""
        given = {
            "--device": self.device not in ("auto", "cpu"),
            "--dtype": self.dtype != "auto",
        }
        return [flag for flag, is_given in given.items() if is_given]

    @property
    def torch_dtype(self) -> str:
        """Return the target's number format in torch."""
        return "float32" if self.dtype == "auto" else self.dtype

    def as_toml(self) -> str:
        """Return the settings in effect, as a --config file."""
        return "".join(f"{name} = {json.dumps(value)}\n" for name, value in self._values().items())

    def as_environment(self) -> dict[str, str]:
        """Return the settings in effect, as environment variables of another process."""
        return {
            f"VERIFIER_{name.upper()}": value if isinstance(value, str) else json.dumps(value)
            for name, value in self._values().items()
        }

    def _values(self) -> dict[str, Any]:
        """Return the values with absolute paths: another process may start in another folder."""
        values = self.model_dump(mode="json", exclude={"config", "print_config"}, exclude_none=True)
        values |= {name: str(value.absolute()) for name in values if isinstance(value := getattr(self, name), Path)}
        if Path(self.model).is_dir() and os.sep in self.model:
            values["model"] = str(Path(self.model).absolute())
        return values


class Environment(EnvSettingsSource):
    """VERIFIER_* variables, except those that Kubernetes adds for a Service called "verifier"."""

    def __call__(self) -> dict[str, Any]:
        values = super().__call__()
        if is_link(str(values.get("port", ""))):
            del values["port"]
        return values


def is_url(text: str) -> bool:
    """Return whether this is an HTTP address."""
    return text.startswith(("http://", "https://")) and bool(urlsplit(text).hostname)


def is_link(port: str) -> bool:
    """Return whether a port is a service link of Kubernetes, such as tcp://10.0.0.1:8765."""
    return port.startswith(("tcp://", "udp://", "sctp://"))


def read_settings(flags: Sequence[str], prog: str = "python -m cloud.verifier", **values: Any) -> Settings:
    """Read flags, then environment, then the file that either names. prog: how the command was called, for help.

    values: settings given by name in place of flags, `config` among them.

    Raises pydantic's ValidationError or SettingsError, or OSError or ValueError if the file cannot be read.
    """
    path = Path(values["config"]) if values.get("config") else _config_path(flags)
    if path is not None and not path.is_file():
        raise OSError(f"--config: {path} is not a file")
    if path is not None:
        try:
            tomllib.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"--config: {path}: {error}") from error

    class WithFile(Settings):
        __doc__ = Settings.__doc__

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            file = [TomlConfigSettingsSource(settings_cls, path)] if path else []
            return init_settings, Environment(settings_cls), *file

    source = CliSettingsSource[Any](
        WithFile, cli_parse_args=list(flags), cli_prog_name=prog, formatter_class=_HelpFormatter
    )
    arguments: dict[str, Any] = {"_cli_settings_source": source}
    return WithFile(**arguments, **values)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Leaves out defaults that say nothing; those texts name what happens without the flag."""

    def _expand_help(self, action: argparse.Action) -> str:
        return re.sub(r" \(default: (None|False|\[\])?\)$", "", super()._expand_help(action))


def _config_path(flags: Sequence[str]) -> Path | None:
    for index, flag in enumerate(flags):
        if flag == "--config" and index + 1 < len(flags):
            return Path(flags[index + 1])
        if flag.startswith("--config="):
            return Path(flag.removeprefix("--config="))
    named = os.environ.get("VERIFIER_CONFIG")
    return Path(named) if named else None


def unknown_variables() -> list[str]:
    """Return variables that look like settings but are not, as Kubernetes makes for a Service "verifier"."""
    known = {f"VERIFIER_{name.upper()}" for name in Settings.model_fields}
    return sorted(name for name in os.environ if name.upper().startswith("VERIFIER_") and name.upper() not in known)


def describe_errors(error: ValidationError) -> str:
    """Describe all faults as `--flag: what is wrong`, in one line, with the environment variable of the value."""
    faults: Sequence[Mapping[str, Any]] = error.errors()
    return "; ".join(map(_describe, faults))


def _describe(fault: Mapping[str, Any]) -> str:
    text = str(fault["msg"]).removeprefix("Value error, ")
    if not fault["loc"]:
        return text
    name = str(fault["loc"][0])
    variable, value = f"VERIFIER_{name.upper()}", str(fault["input"])
    source = f" (the environment has {variable}={value})" if os.environ.get(variable) == value else ""
    return f"--{name.replace('_', '-')}: {text}{source}"
