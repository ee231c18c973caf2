"""The target on somebody else's server, vLLM or SGLang, over HTTP: no weights here, and no torch."""
