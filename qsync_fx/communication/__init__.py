"""What ranks send each other in place of FP32 gradients, and how.

    codecs/      values to bytes and back
    assigned     which codec each parameter has: one for all that are large, or as a plan says
    geometry     which rank sums which part of a parameter
    wire/        bytes between ranks: every pair at once, what stands before them, and what ranks tell each other at the end of a step
    bucket       what is averaged at once
    reduction    the mean over ranks, with the same bits on all of them
    aqgb/        AQGB's rule, as pure functions, and the same at work; gathering, how its buckets are reduced
    state        what is left of gradients, and where the random streams are; residuals, under a loss scale that changes
    handle       what a user holds of any of these
    compression  the hook of DistributedDataParallel; tally, what it has sent
    duo/         the same in few bits at once and in FP32 behind the next step
    sharded      the reduction of FSDP2
    control      what ranks tell one another beside gradients, whatever backend their process group has
    speeds/      how long all this takes: measured, and foreseen

`qsync_fx.distributed.compress` puts it under a model.

How long gradients take in each codec: measured, and foreseen.

Bytes between ranks: every pair at once, what stands before them, who waits for them, and what ranks tell each other at the end.
"""
