"""Code that device, cloud and export share: the wire protocol, drafting, models and the chat API."""
