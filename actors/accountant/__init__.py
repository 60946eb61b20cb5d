"""The usage accountant: one account a request, kept by double entry."""
