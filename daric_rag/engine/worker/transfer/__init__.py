"""Moving KV between canonical records in host memory and the paged blocks of a layer."""
