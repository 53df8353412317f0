"""The stages of a cut against the whole model, in one process: loss, gradients and buffers of one microbatch."""
