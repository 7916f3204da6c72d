"""Which candidate is fastest where: what is measured, kept in tables, and recorded for machines without a GPU."""
