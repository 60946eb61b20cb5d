"""Settings: how they are declared, and those of the runtime, an engine, a cluster and an upstream."""
