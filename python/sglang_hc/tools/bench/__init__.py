"""Benchmarks that compare sglang-hc with plain SGLang and with HiCache on one trace."""
