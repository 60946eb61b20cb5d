"""How well prompts are routed to several engines, and what a decision costs (`python -m bench.routing`)."""
