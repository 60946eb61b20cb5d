"""The router: which engine serves a prompt, from what each one caches and has to do."""
