"""Accounting of FLOPs: the formulas, and the ledger by role with its budget."""
