"""One OpenAI-compatible address in front of prefill and decode instances."""
