"""The control plane: typed commands over ZeroMQ (`protocol`, `commands`, `server`, `client`)."""
