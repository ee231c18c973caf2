"""Options of a fleet: the number of replicas and the resources of each."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

DEPLOYMENT = "Replica"
STICKY_ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"


class Proxy(StrEnum):
    """The proxy between devices and replicas."""

    PYTHON = "python"
    HAPROXY = "haproxy"


class ScaleError(Exception):
    """The replicas cannot be run as requested; one clear line."""


class Scale(BaseModel):
    """The number of replicas and their resources. Flags of the command and arguments of `build`."""

    model_config = ConfigDict(extra="forbid")

    replicas: Annotated[int, Field(ge=1, description="replicas to run; with --max-replicas, the least number")] = 1
    max_replicas: Annotated[
        int, Field(ge=0, description="add replicas as devices connect, up to this number; 0: always --replicas")
    ] = 0
    sessions_per_replica: Annotated[
        int, Field(ge=1, description="connections a replica is meant for; it accepts at most twice as many")
    ] = 64
    gpus_per_replica: Annotated[float, Field(ge=0, description="GPUs reserved for each replica; 0: none")] = 0
    cpus_per_replica: Annotated[float, Field(ge=0, description="CPU cores reserved for each replica")] = 1
    drain_seconds: Annotated[
        float, Field(ge=0, description="seconds that a stopping replica leaves its devices to disconnect by themselves")
    ] = 5
    sticky: Annotated[
        bool, Field(description="route connections with the same x-session-id header to the same replica")
    ] = False

    @model_validator(mode="after")
    def _check(self) -> Scale:
        if 0 < self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is less than replicas {self.replicas}")
        return self

    def options(self) -> dict[str, Any]:
        """Options of the Serve deployment. An open WebSocket is one ongoing request for its whole life."""
        options: dict[str, Any] = {
            "name": DEPLOYMENT,
            "max_ongoing_requests": 2 * self.sessions_per_replica,
            "max_queued_requests": self.sessions_per_replica,
            "graceful_shutdown_timeout_s": self.drain_seconds,
            "graceful_shutdown_wait_loop_s": 0.5,
            "health_check_period_s": 5,
            "health_check_timeout_s": 30,
            "ray_actor_options": {"num_gpus": self.gpus_per_replica, "num_cpus": self.cpus_per_replica},
        }
        if self.max_replicas:
            options["autoscaling_config"] = {
                "min_replicas": self.replicas,
                "max_replicas": self.max_replicas,
                "target_ongoing_requests": self.sessions_per_replica,
                "upscale_delay_s": 10,
                "downscale_delay_s": 600,
            }
        else:
            options["num_replicas"] = self.replicas
        if self.sticky:
            options["request_router_config"] = {"request_router_class": STICKY_ROUTER}
        return options
