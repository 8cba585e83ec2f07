"""smoe-mp: a streaming expert cache for Mixture-of-Experts models larger than memory.

    import smoe_mp

    with smoe_mp.attach("demo") as ring:
        with ring.fetch(layer, experts) as batch:      # demand, wait, hold
            gate = batch[0].dequantize("gate")

A map of the package, from files to clients; each part uses only what stands before it:

    errors                    every exception
    sources/, quant           model files that experts are read from; Q4 and Q2
    tables                    read plans and the tables in shared memory
    _native, segments         the C module; making and removing a ring
    config, runtime           configuration; the run-time folder
    sizing, fit               how large a ring
    supervisor, process, pool `smoe-mp up`: the child processes and who keeps them alive
    log, notify               the lines that a system says; what a service manager is told
    prewarm, histogram        popularity: loading by it, keeping it
    control/                  commands over ZeroMQ
    models, launch, detach    what may be named as a model; a system as a child process, or in the background
    ring                      the client: attach, fetch, release
    torch, transformers/      extras: views as torch tensors, models on streamed experts
    text, run                 tokens to text; `smoe-mp run`
    trace, trace_view         what was asked of a ring: recording, files, figures
    engine, tiny              a whole model in numpy on a ring; the small one that comes along
    cli, watch, completion    the command line
    inspect, demo             what a vault holds; the demonstration
"""

from smoe_mp.errors import SmoeError
from smoe_mp.ring import Batch, Expert, QuantizedTensor, Ring, attach
from smoe_mp.runtime import version

__all__ = ["Batch", "Expert", "QuantizedTensor", "Ring", "SmoeError", "__version__", "attach"]
__version__ = version()
