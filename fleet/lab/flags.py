"""What a benchmark may have to say against its own numbers, in words for people."""

FLAGS = {
    "noisy": "the host was busy with other work",
    "throttled": "it grew slower from beginning to end, as a device does that gets hot",
    "unstable_warmup": "it had not settled when the measurement began",
    "too_few_queries": "too few queries to bound its P99",
}
"""Reasons why a latency is not valid."""

WARNINGS = {
    "memory": "at its peak it takes more than 70 % of the memory that the device had free",
    "fallback": "a layer is more than 10 times slower than its peers: probably no fast kernel for it",
}
"""What does not make a latency wrong but ought to be known."""
