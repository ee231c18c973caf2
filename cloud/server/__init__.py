"""What the verifier answers on the network: WebSocket, HTTP, limits, pages."""
