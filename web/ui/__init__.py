"""The pages at `/ui`: their files, the headers of their responses, and the two endpoints that only they need."""
