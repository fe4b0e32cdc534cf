"""What all generated modules do alike, as plain Python.

convgen/emit/paste.py pastes of it what a single module needs, and writes all of it beside modules that are compiled
together.

A file an idea; those that `import` one another run down this list, and types may name what comes later.

    layout       which part of a tensor a rank holds: blocks, and windows of rows
    meetings     where ranks meet when a call begins
    transport    the seam: everything that leaves a rank goes through it
    mesh         where this rank is
    here         this rank in this call
    conversions  from one layout to another
    envelope     one message at each entry, by which ranks that differ find that out
    reductions   numbers of a whole tensor, of the ranks' blocks
    blocks       parameters that torch's tools understand, or that refuse them
    checks       arguments and modules that don't fit are refused before anything is sent
    local_check  CONVGEN_CHECK_LOCAL=1
    local        local convolutions of ATen
    ops          the torch ops of a layer
    gradients    of convolutions, of gather and scatter
    parameters   a rank's block as part of a whole tensor
    mixed        lists in which DTensors mix with other tensors
    clipping     a norm of any mix of parameters
    graphs       phases as CUDA graphs
    conv_module  a layer as torch.nn.Module
    layer        what a module says of its layer, and what users call

Networks have, beside these:

    recent       what is kept for the sizes of the last calls
    convolved    a GPU's kernels in the place of ATen's convolutions
    splits       blocks of tensors, and their text
    lanes        collectives in flight: started on a lane, and waited for later
    buckets      gradients of parameters that are summed together while backward goes on
    copies       CONVGEN_COMPARE=k: copies that have parted, and rows that make a NaN
    pieces       rows in pieces: the interior while the halo travels, then the boundary
    rows         rows of a network on this rank: what moves for them, and where their local code stands
    net          what a package says of its network, and what users call
    foreseen     what a call takes, before it takes it
    kernels_ahead  a GPU's kernels, compiled before they are launched
    any_size     a network at sizes that are known at run time only
    checkpoints  activation checkpointing: all ranks compute again at the same place
    run          a network's rows in one call of it
    inside       parameters of a call as plain blocks
    scopes       modules of the source: names of parameters, read and not called
    steps        a step as one CUDA graph
    network      a network as torch.nn.Module

What depends on the layer comes in a Layer, on the network in a Net. Of convgen, files know what is pasted with them.
"""
