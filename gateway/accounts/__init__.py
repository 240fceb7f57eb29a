"""Accounts: what tenants may use, and what they have used.

Limits are taken before a request runs, and settled with its ledger entry when it has ended.
"""
