"""KV events: what the prefix cache holds, published for routers."""
