"""What the benchmarks share: servers, traces, requests, cells, tables."""
