"""Serve a target that another server runs."""

from __future__ import annotations

from cloud.engine.features import NoServerHalf
from cloud.engine.served_model import ServedModel
from cloud.settings import Settings
from cloud.upstream_engine.client import connect
from cloud.upstream_engine.runner import UpstreamRunner
from outrider_core.cache import expanded
from outrider_core.chat.tokenizer import open_chat_tokenizer
from outrider_core.models.drafter_arrays import check_target, read_drafter
from outrider_core.models.target import model_folder
from outrider_core.targets.identity import model_identity
from outrider_core.targets.source import TargetError, TargetSource, eos_ids_of
from outrider_core.targets.weights import read_json


def load_model(settings: Settings, source: TargetSource) -> ServedModel:
    """Connect to the server of --upstream, which must serve the target in `source`.

    Only the target's tokenizer and configuration are read here. Raises TargetError or DrafterError.
    """
    folder, drafter_hash = model_folder(source), ""
    identity = source.identity if folder == source.path else model_identity(folder)
    if settings.drafter:
        config, _, drafter_hash = read_drafter(expanded(settings.drafter))
        check_target(config.target_hash, source.name, identity, settings.drafter)
    try:
        values = read_json(folder / "config.json")
        vocab_size, eos_ids = int(values.get("text_config", values)["vocab_size"]), eos_ids_of(folder)
        tokenizer = open_chat_tokenizer(folder)
    except (OSError, ValueError, KeyError) as error:
        raise TargetError(f"{source.name}: {error}") from None
    server = connect(settings.upstream, vocab_size)
    return ServedModel(
        name=source.name,
        target_hash=identity,
        drafter_hash=drafter_hash,
        arithmetic=f"upstream-{server.name}-{server.release}",
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        vocab_size=vocab_size,
        max_positions=server.positions,
        runner=UpstreamRunner(server, settings.kv_tokens),
        features=NoServerHalf(),
        top=server.top,
    )
