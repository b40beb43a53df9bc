"""kv-coordinator: owns each handoff of KV-cache pages from a prefill engine to a decode engine."""

__version__ = "0.1.0"
