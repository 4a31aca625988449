"""Every kind of KV cache, in the tensors that vLLM's own spec and layout code makes of it, moved by real NIXL."""
