"""A Hugging Face checkpoint on disk: headers, lazy tensors, writing shards, publishing whole folders, the record."""
