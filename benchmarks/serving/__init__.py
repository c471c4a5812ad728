"""Serving: throughput against latency, of an engine and of what else a server may do."""
