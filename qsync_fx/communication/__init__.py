"""What ranks send each other in place of FP32 gradients.

codecs/      values to bytes and back
"""
