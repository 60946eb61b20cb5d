"""The APIs: from request bodies to responses, with one request life cycle for all of them."""
