"""Text to batches: documents, tokenizer, token shards, batches. Nothing distributed."""
