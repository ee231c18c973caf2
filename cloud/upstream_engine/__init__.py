"""The target on another server, vLLM or SGLang, over HTTP: no weights here, and no torch."""
