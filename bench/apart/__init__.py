"""`python -m bench.apart`: prefill and decode on different engines, beside engines for both.

A trace in virtual time, and the transfer between two engines as it is.
"""
