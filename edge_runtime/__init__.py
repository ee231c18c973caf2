"""The device side: drafts trees, streams them, survives the network. Never imports torch.

from edge_runtime.runtime import EdgeRuntime

async with EdgeRuntime.from_bundle("build/bundle", server="ws://127.0.0.1:8765") as runtime:
    async for event in runtime.generate("Why is the sky blue?"):
        ...
"""
