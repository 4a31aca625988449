"""Claims, leases and acknowledgements: pure state machines and the messages between them."""
