"""The verifier's network side: WebSocket, HTTP, limits, pages."""
