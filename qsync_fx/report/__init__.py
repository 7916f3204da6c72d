"""What people read: tables in a terminal, and graphs for other tools.

Invariant: reports read explanations, plans and measurements; nothing depends on a report.
"""
