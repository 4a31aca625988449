"""The control path: one listener per engine core, and clients that never block an engine."""
