"""KV events: the contents of the prefix cache, published for routers."""
