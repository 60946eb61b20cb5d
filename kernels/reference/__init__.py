"""The reference backend: plain torch in fixed tiles, the oracle of every other backend."""
