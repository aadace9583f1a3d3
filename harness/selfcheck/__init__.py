"""The harness measured: known faults and its score on them, speed beside other engines, our own adapters."""
