"""One verifier: target, drafter's server half, pool, sessions and the engine thread, put together."""

from __future__ import annotations

from pathlib import Path

import torch

from cloud.batcher import Batcher, Job
from cloud.engine import Engine
from cloud.features import FeatureProducer
from cloud.kvpool import KVPool
from cloud.packing import pack_linears
from cloud.sessions import SessionStore
from cloud.settings import Settings
from models.moa import DrafterError, MoAConfig, load_drafter, server_half
from models.target import Target, load_target
from protocol.wire import MAX_TOKENS, PROTOCOL_VERSION, Welcome

Drafter = tuple[MoAConfig, dict[str, torch.Tensor], str]


class Verifier:
    """What the sockets talk to. `start` it before use and `stop` it at the end.

    The target's attention is replaced: do not use its model elsewhere at the same time.
    Raises DrafterError where the drafter does not belong to the target.
    """

    def __init__(self, target: Target, drafter: Drafter, settings: Settings) -> None:
        config, tensors, self.drafter_hash = drafter
        model, shape = target.model, target.config
        _check_drafter(config, target)
        self.target_hash = target.model_hash
        self.vocab_size: int = shape.vocab_size
        self.max_context = min(settings.max_context, shape.max_position_embeddings, MAX_TOKENS)
        self.max_nodes = settings.max_nodes
        pool = KVPool(
            shape.num_hidden_layers,
            settings.kv_tokens,
            config.target_kv_heads,
            config.target_head_dim,
            model.dtype,
            model.device,
        )
        self.features = FeatureProducer(config, server_half(config, tensors), pool)
        self.engine = Engine(model, target.eos_ids, self.max_context, pool, self.features)
        self.sessions = SessionStore(pool, self.features.shape, settings.max_sessions, settings.session_ttl)
        self._batcher = Batcher(
            self.engine,
            self.sessions,
            max_context=self.max_context,
            max_nodes=self.max_nodes,
            prefill_chunk=settings.prefill_chunk,
        )
        self._draining = False

    def start(self) -> None:
        """Start the engine thread."""
        self._batcher.start()

    def drain(self) -> None:
        """Take no new connections."""
        self._draining = True

    def stop(self) -> None:
        """End the engine thread after the step under way."""
        self.drain()
        self._batcher.stop()

    @property
    def alive(self) -> bool:
        """The engine thread runs."""
        return self._batcher.alive

    @property
    def ready(self) -> bool:
        """New connections are welcome."""
        return self.alive and not self._draining

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
            self._batcher.tree_budget,
            "outrider",
        )


def load_verifier(settings: Settings) -> Verifier:
    """Load what the settings name. Raises TargetError or DrafterError with one clear line."""
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if settings.threads:
        torch.set_num_threads(settings.threads)
    drafter = load_drafter(Path(settings.drafter).expanduser())
    target = load_target(settings.model, settings.dtype, device)
    pack_linears(target.model)
    return Verifier(target, drafter, settings)


def _check_drafter(config: MoAConfig, target: Target) -> None:
    shape = target.config
    if config.target_hash != target.model_hash:
        raise DrafterError(
            f"this drafter was trained on target {config.target_hash}, but {target.name} is {target.model_hash}; "
            "give --drafter a folder made for it"
        )
    head_dim = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    wanted = (config.target_kv_heads, config.target_head_dim, config.hidden_size, config.vocab_size)
    given = (shape.num_key_value_heads, head_dim, shape.hidden_size, shape.vocab_size)
    if wanted != given or not all(0 <= layer < shape.num_hidden_layers for layer in config.target_layers):
        raise DrafterError(f"the drafter's shapes {wanted} do not fit {target.name}'s {given}")
