"""The OpenAPI document at `/openapi.json`, made of what routes and bodies declare."""
