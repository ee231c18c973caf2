"""Settings of the verifier: command line flags and `VERIFIER_*` environment variables, one class for both."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from models.target import DEFAULT_TARGET
from protocol.tree import MAX_NODES

DRAFTERS = Path(__file__).resolve().parent.parent / "drafters"


class Settings(BaseSettings):
    """Serve a target to Outrider devices: verify their draft trees, decode for them, send feature rows."""

    model_config = SettingsConfigDict(
        env_prefix="VERIFIER_",
        cli_prog_name="python -m cloud.verifier",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
    )

    model: Annotated[str, Field(description="target: alias, Hugging Face id or folder")] = DEFAULT_TARGET
    drafter: Annotated[Path, Field(description="drafter folder, trained on this target")] = (
        DRAFTERS / f"{DEFAULT_TARGET}-moa"
    )
    host: Annotated[str, Field(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, description="TCP port; 0 picks a free one")] = 8765
    insecure: Annotated[
        bool, Field(description="listen beyond loopback although there is no TLS and no authentication")
    ] = False
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16", "float64"], Field(description="the target's number format")
    ] = "float32"
    device: Annotated[str, Field(description="torch device; auto takes CUDA where there is one")] = "auto"
    threads: Annotated[int, Field(ge=0, description="CPU threads of torch; 0 leaves torch's choice")] = 0
    max_context: Annotated[
        int, Field(ge=2, le=1 << 17, description="longest sequence in tokens, if the target can do it")
    ] = 2048
    max_nodes: Annotated[int, Field(ge=0, le=MAX_NODES, description="most nodes of one draft tree")] = 128
    max_sessions: Annotated[int, Field(ge=1, description="session records kept")] = 256
    session_ttl: Annotated[float, Field(gt=0, description="seconds an unused session is remembered")] = 3600.0
    kv_tokens: Annotated[int, Field(ge=1, description="key/value rows of all sessions together")] = 16384
    prefill_chunk: Annotated[
        int, Field(ge=1, le=4096, description="prompt tokens run per step, all sessions together")
    ] = 512

    @model_validator(mode="after")
    def _check(self) -> Settings:
        if not self.insecure and not _is_loopback(self.host):
            raise ValueError(
                f"host {self.host} is reachable from outside, but there is no TLS and no authentication yet; "
                "use 127.0.0.1 behind a proxy, or add --insecure"
            )
        least = self.max_context + self.max_nodes
        if self.kv_tokens < least:
            raise ValueError(
                f"kv_tokens {self.kv_tokens} cannot hold one session of max_context {self.max_context} and a tree "
                f"of max_nodes {self.max_nodes}; use at least {least}"
            )
        return self


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
