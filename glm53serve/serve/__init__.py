"""What crosses the pipe between a gateway and the engine."""
