"""What backward passes need beside products: gates, rounding on the way back, and derivatives that have none of their own."""
