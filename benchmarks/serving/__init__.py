"""Serving: throughput and latency of an engine and of other servers."""
