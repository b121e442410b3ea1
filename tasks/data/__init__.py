"""Images in, manifest and memory-mapped shards out."""
