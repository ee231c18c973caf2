"""The verifier as an object: target, drafter's server half, KV pool, sessions and engine thread, put together."""

from __future__ import annotations

import os
import time
from importlib.metadata import version
from pathlib import Path

import torch

from cloud import log
from cloud.auth import Accounts
from cloud.batcher import Batcher
from cloud.colocated import Colocated
from cloud.engine import Engine
from cloud.features import FeatureProducer
from cloud.jobs import Job
from cloud.kvpool import KVPool
from cloud.metrics import Metrics
from cloud.parallel import Leader, Ranks, follow
from cloud.runner import LocalRunner, ModelRunner
from cloud.sessions import SessionStore
from cloud.settings import Settings
from cloud.tree_budget import measure_costs
from outrider_core.models.drafter_files import load_drafter
from outrider_core.models.moa import DeviceHalf, DrafterError, MoAConfig, device_half_on, server_half
from outrider_core.models.packing import pack_linears
from outrider_core.models.target import Target, TargetError, head_dim_of, load_target, open_target
from outrider_core.protocol.wire import MAX_TOKENS, PROTOCOL_VERSION, Welcome

Drafter = tuple[MoAConfig, dict[str, torch.Tensor], str]
VERSION = version("outrider")


class Verifier:
    """What sockets, HTTP endpoints and a runtime in the same process submit jobs to. `start` it first, `stop` it last.

    The target's attention is replaced, so its model must not be used elsewhere at the same time. runner: runs the
    target (default: in this process alone). device: the drafter's device half, to draft here too.

    Raises DrafterError if the drafter does not belong to the target.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        settings: Settings,
        accounts: Accounts | None = None,
        runner: ModelRunner | None = None,
        device: DeviceHalf | None = None,
    ) -> None:
        config, tensors, self.drafter_hash = drafter
        shape = target.config
        _check_drafter(config, target)
        self.target_hash, self.tokenizer = target.model_hash, target.tokenizer
        self.model_name = settings.served_model_name or target.name
        self.vocab_size: int = shape.vocab_size
        self.max_context = min(settings.max_context, shape.max_position_embeddings, MAX_TOKENS)
        self.max_nodes = settings.max_nodes
        self.accounts = Accounts() if accounts is None else accounts
        self.metrics = Metrics()
        self.metrics.serving(version=VERSION, target=self.target_hash, drafter=self.drafter_hash)
        self._runner = runner or make_runner(target, settings)
        self._kv_tokens = settings.kv_tokens
        pool = KVPool(settings.kv_tokens, self._runner.move)
        self.features = FeatureProducer(config, server_half(config, tensors), target.model.device)
        self.engine = Engine(self._runner, pool, self.features, target.eos_ids, self.max_context)
        self.sessions = SessionStore(pool, self.features.shape, settings.max_sessions, settings.session_ttl)
        self._batcher = Batcher(
            self.engine,
            self.sessions,
            self.metrics,
            max_context=self.max_context,
            max_nodes=self.max_nodes,
            prefill_chunk=settings.prefill_chunk,
            max_step_failures=settings.max_step_failures,
            max_step_seconds=settings.max_step_seconds,
            fixed_budget=min(settings.tree_budget, self.max_nodes),
            colocated=None if device is None else Colocated(device, self.max_context),
        )
        self.draining = False

    def calibrate(self) -> None:
        """Time steps of several sizes, so that `tree_budget` follows what trees cost here. Call it before `start`."""
        budget = self._batcher.scheduler.budget
        budget.curve = curve = measure_costs(self._runner, self._kv_tokens)
        budget.choose()
        times = {str(tokens): round(1000 * took, 2) for tokens, took in zip(curve.tokens, curve.seconds, strict=True)}
        log.info("steps timed", milliseconds=times, tree_budget=self._batcher.scheduler.tree_budget)

    def start(self) -> None:
        """Start the engine thread."""
        self._batcher.start()

    def drain(self) -> None:
        """Accept nothing new."""
        self.draining = True
        self.metrics.draining.set(1)

    def stop(self) -> None:
        """End the engine thread after the step under way, and the other ranks."""
        self.drain()
        self._batcher.stop()
        if isinstance(self._runner, Leader):
            self._runner.stop()

    @property
    def alive(self) -> bool:
        """Whether requests can be answered: the opposite of `broken`."""
        return self._batcher.alive

    @property
    def broken(self) -> str | None:
        """Why no request can be answered any more: the engine thread has ended or hangs, or every step fails."""
        return self._batcher.broken

    @property
    def idle(self) -> bool:
        """Whether no request is under way."""
        return self._batcher.idle

    @property
    def ready(self) -> bool:
        """Whether new connections are accepted."""
        return self.alive and not self.draining

    def submit(self, job: Job) -> None:
        """Hand a job to the engine thread, from any thread."""
        self._batcher.submit(job)

    def welcome(self) -> Welcome:
        """What a device learns in the handshake."""
        return Welcome(
            PROTOCOL_VERSION,
            self.target_hash,
            self.drafter_hash,
            self.vocab_size,
            self.max_context,
            self.max_nodes,
            self._batcher.scheduler.tree_budget,
            f"outrider {VERSION}",
            curve.pack() if (curve := self._batcher.scheduler.budget.curve) else b"",
        )


def make_runner(target: Target, settings: Settings) -> LocalRunner:
    """This rank's runner, with its share of the KV heads."""
    shape = target.config
    heads = shape.num_key_value_heads // settings.tp
    return LocalRunner(target.model, settings.kv_tokens, heads, head_dim_of(shape))


def load_verifier(settings: Settings) -> Verifier:
    """Load what the settings name. Raises TargetError, DrafterError or AuthError with a message of one line.

    With settings.tp > 1 only rank 0 returns; the others follow it until it ends, then raise SystemExit(0).
    """
    accounts = Accounts(settings.auth_file)
    if settings.tp == 1 or settings.threads:  # else torchrun has set them
        torch.set_num_threads(settings.threads or max(1, torch.get_num_threads() - 1))
    drafter = load_drafter(Path(settings.drafter).expanduser())
    ranks = _ranks(settings)
    begun = time.perf_counter()
    target = load_target(settings.model, settings.dtype, _device(settings, ranks), settings.tp)
    device = None
    if settings.colocated_drafter and (ranks is None or ranks.rank == 0):
        device = device_half_on(*drafter[:2], *open_target(settings.model).tables()).to(target.model.device)
    if ranks is None:
        pack_linears(target.model)
        verifier = Verifier(target, drafter, settings, accounts, device=device)
    else:
        runner = make_runner(target, settings)
        if ranks.rank > 0:
            follow(runner, ranks)
            raise SystemExit(0)
        verifier = Verifier(target, drafter, settings, accounts, Leader(runner, ranks), device)
    log.info("loaded", model=settings.model, dtype=settings.dtype, seconds=round(time.perf_counter() - begun, 1))
    if not settings.tree_budget:
        verifier.calibrate()
    return verifier


def _ranks(settings: Settings) -> Ranks | None:
    if settings.tp == 1:
        return None
    ranks = Ranks() if "RANK" in os.environ else None
    if ranks is None or ranks.size != settings.tp:
        found = 1 if ranks is None else ranks.size
        raise TargetError(
            f"--tp {settings.tp} needs as many processes, but there is {found}; "
            f"start with: torchrun --nproc-per-node {settings.tp} -m cloud.verifier --tp {settings.tp} ..."
        )
    return ranks


def _device(settings: Settings, ranks: Ranks | None) -> str:
    if settings.device != "auto":
        return settings.device
    if not torch.cuda.is_available():
        return "cpu"
    return "cuda" if ranks is None else f"cuda:{torch.cuda.current_device()}"


def _check_drafter(config: MoAConfig, target: Target) -> None:
    shape = target.config
    if config.target_hash != target.model_hash:
        raise DrafterError(
            f"this drafter was trained on target {config.target_hash}, but {target.name} is {target.model_hash}; "
            "give --drafter a folder that was trained for it"
        )
    head_dim = head_dim_of(shape)
    wanted = (config.target_kv_heads, config.target_head_dim, config.hidden_size, config.vocab_size)
    given = (shape.num_key_value_heads, head_dim, shape.hidden_size, shape.vocab_size)
    if wanted != given or not all(0 <= layer < shape.num_hidden_layers for layer in config.target_layers):
        raise DrafterError(f"the drafter's shapes {wanted} do not fit {target.name}'s {given}")
