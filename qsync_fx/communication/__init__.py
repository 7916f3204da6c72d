"""What ranks send each other in place of FP32 gradients, and how.

    codecs/      values to bytes and back
    assigned     which codec each parameter has: one for all that are large, or as a plan says
    geometry     which rank sums which part of a parameter
    messages     what stands before the bytes; verdict, what ranks tell each other at the end of a step
    exchange     every pair at once; worker, the one thread that waits for other ranks
    bucket       what is averaged at once
    reduction    the mean over ranks, with the same bits on all of them
    adaptive     AQGB's rule, as pure functions; control, the same at work; gathering, how its buckets are reduced
    state        what is left of gradients, and where the random streams are; residuals, under a loss scale that changes
    handle       what a user holds of any of these
    compression  the hook of DistributedDataParallel; tally, what it has sent
    duo/         the same in few bits at once and in FP32 behind the next step
    sharded      the reduction of FSDP2

`qsync_fx.distributed.compress` puts it under a model.
"""
