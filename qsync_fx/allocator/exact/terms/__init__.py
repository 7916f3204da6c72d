"""What things take and hold, as linear expressions of what is chosen.

`formats` is what operators compute in and give out, `prices` what states take alone, `beside` what they take beside their neighbours,
`casting` what conversions take, `memory` what is kept; a `Charge` is what is taken, and where.
"""
