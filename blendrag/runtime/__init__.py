"""All that touches vLLM's internals.  The rest of blendrag uses `start_engine` and `EngineLoop`."""
