"""Agreement between ranks and failure detection, independent of collectives.

`Meeting` (rendezvous.py) is the entry point: a context in which ranks compare statements
(agreement.py) and a heartbeat thread detects failed ranks (rank_liveness.py). All messages pass
through the store of torch.distributed (store_channel.py), because a rank may be blocked in a
collective.
"""
